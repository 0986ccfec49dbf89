"""The interface of output heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from penstock.contract import SchedulerOutput
from penstock.device import Device
from penstock.runner.async_output import StepOutput
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import PromptLogprobs, Sampler
from penstock.runner.slot_owners import SlotOwners
from penstock.runner.speculative import Speculator
from penstock.runner.stage import Stage
from penstock.step.frame import Frame, WantedOutputs


class HeadParts(NamedTuple):
    """Parts of a runner that its output head uses. rank: named in errors."""

    device: Device
    requests: RequestStates
    owners: SlotOwners
    sampler: Sampler
    prompt_logprobs: PromptLogprobs
    speculator: Speculator
    stage: Stage
    rank: int


class OutputHead(ABC):
    """Decides which outputs a frame wants of the forward pass, and makes the step's result from them."""

    @abstractmethod
    def wants(self, frame: Frame) -> WantedOutputs:
        """Outputs that a built frame wants: equal for all steps that repeat it, and on all ranks."""

    @abstractmethod
    def finish(self, frame: Frame) -> StepOutput:
        """Return the result of an executed step, with its copy to the host started; all owners commit the outcome."""

    def settle(self, output: SchedulerOutput, buffer_set: int | None) -> None:  # noqa: B027
        """Receive and commit the outcomes that a step depends on, or whose frames are in the buffers that it takes."""

    def catch_up(self) -> None:  # noqa: B027
        """Receive and commit the outcomes of all executed steps."""


# Makes the output head of a runner.
HeadFactory: TypeAlias = Callable[[HeadParts], OutputHead]
