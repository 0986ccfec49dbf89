"""Interface of owners of per-slot state.

A feature with state per request is an owner: it is called when a request takes a slot, gets blocks and leaves; it
fills the step inputs that it has declared, and commits each step's outcome.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Sequence
from typing import Protocol

from penstock.contract import NewRequestData, Part, SchedulerOutput
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.kv_cache import PagedKVCache
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput


class PendingPart(Protocol):
    """Part of a step's results in copy from the device to the host."""

    def get(self, timeout_s: float) -> Part:
        """Return the part. Raises WaitTimeout when the device has not delivered it within `timeout_s` seconds."""


class SlotOwner(ABC):  # noqa: B024 - an owner implements what it needs
    """State of requests by slot. All methods are optional; a method that an owner does not override is not called.

    step_inputs: inputs that `fill` writes, at the same addresses in every step of a buffer set.
    """

    step_inputs: Sequence[StepInput] = ()

    def use_kv_cache(self, kv_cache: PagedKVCache) -> None:  # noqa: B027
        """Keep a reference to the runner's KV cache, once it is allocated."""

    def begin(self, output: SchedulerOutput) -> None:  # noqa: B027
        """Read the parts of a step's message, before its requests change. Not called for a message without parts."""

    def add(self, slot: int, request: NewRequestData) -> None:  # noqa: B027
        """Add a request; the slot's previous state is overwritten.

        An exception ends the request with an error: `rollback` of all owners is called then.
        """

    def rollback(self, slot: int) -> None:
        """Undo `add`, whether this owner has added the request, has failed to, or was not called yet.

        Writes staged for it must not reach the device afterwards.
        """
        self.remove(slot)

    def extend(self, slot: int, block_ids: tuple[list[int], ...]) -> None:  # noqa: B027
        """Append blocks to the request's block tables; one list per KV-cache group."""

    def remove(self, slot: int) -> None:  # noqa: B027
        """Remove the slot's request; the slot may be reused at once."""

    def flush(self) -> None:  # noqa: B027
        """Upload the writes staged for this step."""

    def has_work(self, frame: Frame) -> bool:
        """Whether a step needs the owner's step inputs: by its message, or by its requests. Equal on all ranks.

        frame: with its message, and its batch (`frame.batch.layout.slots_np`). Called once for a frame that is kept.
        """
        return False

    def fill(self, frame: Frame) -> None:  # noqa: B027
        """Write the step inputs, `frame.inputs.named`, except padding rows. Called where `has_work` is true.

        A request whose reason is added to `frame.errors` ends with this error, and its results are dropped.
        """

    def reads_hidden(self, frame: Frame) -> Collection[int] | None:
        """Layers whose inputs `part_of_hidden` reads, for all tokens (`Frame.aux`), beside the last hidden states
        (`Frame.all_hidden`); None if it reads neither.

        Called once for a frame that is kept. Equal on all ranks. Programs are recorded for the first sets of layers
        only (`AuxSets`), and CUDA graphs for those of a drafter.
        """
        return None

    def part_of_hidden(self, frame: Frame) -> Part | PendingPart | None:
        """Return this feature's part of the results of a sampled step, made from the hidden states that it reads.

        The next step overwrites the frame's tensors. Only the last pipeline stage calls it.
        """
        return None

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:  # noqa: B027
        """Commit the step's computed and sampled tokens. The next step overwrites the frame's tensors."""

    def commit_computed(self, frame: Frame) -> None:  # noqa: B027
        """The first half of `commit` on a pipeline stage that does not sample: as if all drafts were accepted."""

    def commit_sampled(self, frame: Frame, outcome: StepOutcome) -> None:
        """The second half of `commit`, once the outcome is received."""
        self.commit(frame, outcome)

    def part_of_results(self, output: SchedulerOutput) -> Part | PendingPart | None:
        """Return this feature's part of the step's results for its scheduler side, or None.

        A `PendingPart` is made from a copy in flight, once the step's tokens are read.
        """
        return None

    def dummy(self, frame: Frame) -> None:  # noqa: B027
        """Run the collectives and kernels of `commit` after a step without requests."""
