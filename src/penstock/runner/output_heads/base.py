"""The interface of output heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from penstock.contract import SchedulerOutput
from penstock.device import Device
from penstock.runner.async_output import AsyncOutput, ReadyOutput
from penstock.runner.frame import BufferSet, Frame, WantedOutputs
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import PromptLogprobs, Sampler
from penstock.runner.slot_owners import SlotOwners
from penstock.runner.speculative import Speculator
from penstock.runner.stage import Stage


class HeadParts(NamedTuple):
    """The parts of a runner that its head works with. rank: for what a wait is called."""

    device: Device
    requests: RequestStates
    owners: SlotOwners
    sampler: Sampler
    prompt_logprobs: PromptLogprobs
    speculator: Speculator
    stage: Stage
    rank: int


class OutputHead(ABC):
    """Decides which outputs a frame wants of the forward pass, and makes the step's result of them."""

    @abstractmethod
    def wants(self, frame: Frame) -> WantedOutputs:
        """The outputs of a frame whose batch is put together: equal for all steps that repeat it, and on all ranks."""

    @abstractmethod
    def finish(self, frame: Frame) -> AsyncOutput | ReadyOutput:
        """The result of a step that was run, begun to be copied; all owners commit its outcome."""

    def settle(self, output: SchedulerOutput, buffers: BufferSet | None) -> None:  # noqa: B027
        """Before a step takes these buffers: commit outcomes that another rank has and that this step needs."""

    def catch_up(self) -> None:  # noqa: B027
        """Commit the outcomes of all steps that were run here."""
