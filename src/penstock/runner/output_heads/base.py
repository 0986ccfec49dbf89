"""The interface of output heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from penstock.contract import SchedulerOutput
from penstock.device import Device
from penstock.models.interface import LanguageModel
from penstock.runner.async_output import StepOutput
from penstock.runner.execute.execution import Execution
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import PromptLogprobs, Sampler
from penstock.runner.slot_owners import SlotOwners
from penstock.runner.speculative import Speculator
from penstock.runner.stage import Stage
from penstock.step.frame import Frame, WantedOutputs


class HeadServices(NamedTuple):
    """Services of a runner for its output head. rank: named in errors."""

    device: Device
    requests: RequestStates
    owners: SlotOwners
    sampler: Sampler
    prompt_logprobs: PromptLogprobs
    speculator: Speculator
    stage: Stage
    execution: Execution
    rank: int


class OutputHead(ABC):
    """Decides which outputs a frame wants of its execution, and makes the step's result from them.

    memory_name, memory_why: of the memory term that `profile` and `profile_prompt` measure.
    """

    memory_name, memory_why = "outputs", "outputs"

    @abstractmethod
    def wants(self, frame: Frame) -> WantedOutputs:
        """Outputs that a built frame wants: equal for all steps that repeat it, and on all ranks."""

    @abstractmethod
    def finish(self, frame: Frame) -> StepOutput:
        """Return the result of an executed step, with its copy to the host started; all owners commit the outcome."""

    def profile(self, num_reqs: int, num_rows: int) -> None:  # noqa: B027
        """Make the results of so many requests, which ask for everything. num_rows: logits rows, with drafts."""

    def profile_prompt(self, model: LanguageModel, hidden_TD: Tensor) -> None:  # noqa: B027
        """Make the results of the largest prompt, which asks for everything. hidden_TD: its hidden states."""

    def receive_outcomes(self, output: SchedulerOutput, buffer_set: int | None) -> None:  # noqa: B027
        """Receive and commit the outcomes that a step depends on, or whose frames are in the buffers that it takes."""

    def catch_up(self) -> None:  # noqa: B027
        """Receive and commit the outcomes of all executed steps."""


# Makes the output head of a runner.
HeadFactory: TypeAlias = Callable[[HeadServices], OutputHead]
