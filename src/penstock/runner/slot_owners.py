"""Owners of per-slot state: the interface, and the list of them in one runner.

A feature that keeps something of each request is an owner: it learns when a request takes a slot, gets blocks and
leaves, fills the step inputs that it has declared, and commits each step's outcome.
"""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from penstock.contract import NewRequestData, Part, Parts, SchedulerOutput
from penstock.contract.registration import register_once
from penstock.device import Device
from penstock.kernels.bound_step import StepOutcome
from penstock.models.interface import LanguageModel

if TYPE_CHECKING:
    from penstock.runner.frame import Frame
    from penstock.runner.kv_cache import PagedKVCache
    from penstock.runner.request_states import RequestStates

logger = logging.getLogger(__name__)


class StepInput(NamedTuple):
    """A named input of the model's forward pass, with a row per token.

    shape: of a token's row. padding: the value that rows of padding hold.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    padding: float = 0


class SlotOwner(ABC):  # noqa: B024 - an owner implements what it needs
    """State of requests by slot. Methods do nothing by default, and those of an owner that has none are not called.

    step_inputs: what `fill` writes, at the same addresses in every step of a buffer set.
    """

    step_inputs: Sequence[StepInput] = ()

    def use_kv_cache(self, kv_cache: PagedKVCache) -> None:  # noqa: B027
        """Take the runner's KV cache, once it is there."""

    def begin(self, output: SchedulerOutput) -> None:  # noqa: B027
        """Read the parts of a step's message, before its requests change. Not called for a message without parts."""

    def add(self, slot: int, request: NewRequestData) -> None:  # noqa: B027
        """Take a request over; whatever the slot held before is overwritten.

        What this raises ends the request with an error: all owners `rollback` then.
        """

    def rollback(self, slot: int) -> None:
        """Undo `add`, whether this owner has added the request, has failed to, or was not asked yet.

        Nothing of it may be written to the device afterwards.
        """
        self.remove(slot)

    def extend(self, slot: int, block_ids: tuple[list[int], ...]) -> None:  # noqa: B027
        """The request gets these blocks behind those it has; one list per KV-cache group."""

    def remove(self, slot: int) -> None:  # noqa: B027
        """The request is gone; the next one may come at once."""

    def flush(self) -> None:  # noqa: B027
        """Carry to the device what was staged for this step."""

    def has_work(self, slots_np: np.ndarray) -> bool:
        """Whether one of the requests in these slots needs the owner's step inputs. The same on all ranks.

        Asked once for a frame that is kept.
        """
        return False

    def fill(self, frame: Frame) -> None:  # noqa: B027
        """Write the step inputs, `frame.inputs.named`, for a frame in which it has work, but for rows of padding."""

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:  # noqa: B027
        """Take in what the step has computed and sampled. The next step overwrites the frame's tensors."""

    def commit_computed(self, frame: Frame) -> None:  # noqa: B027
        """The first half of `commit` where a later stage of the pipeline samples: as if all drafts were accepted."""

    def commit_sampled(self, frame: Frame, outcome: StepOutcome) -> None:
        """The second half, once the outcome is known here."""
        self.commit(frame, outcome)

    def part_of_results(self, output: SchedulerOutput) -> Part | None:
        """A part of the step's results, for the scheduler's side of the feature; None where there is none."""
        return None

    def dummy(self, frame: Frame) -> None:  # noqa: B027
        """Run what `commit` runs, after a step that serves no request."""


# Makes an owner for the runner of this model, None where the model needs none: (device, slots, model).
SlotOwnerFactory: TypeAlias = Callable[[Device, int, LanguageModel], SlotOwner | None]

# Names of `ModelInputs`, which programs know as step inputs, too.
MODEL_INPUT_NAMES = frozenset({"token_ids", "positions", "inputs_embeds", "hidden_states"})

_registered: list[SlotOwnerFactory] = []


def register_slot_owner(factory: SlotOwnerFactory) -> None:
    """Let every worker's runner have such an owner. Plugins register functions or classes of their modules.

    Raises ConfigError for a lambda or a nested function.
    """
    register_once(_registered, factory)


def registered_slot_owners() -> Sequence[SlotOwnerFactory]:
    """The factories that plugins have registered, in this order."""
    return tuple(_registered)


class SlotOwners:
    """The owners of one runner. A request is added to all of them or to none.

    requests: the first of them, which gives out the slots.
    """

    def __init__(self, requests: RequestStates, others: Sequence[SlotOwner]) -> None:
        self._requests = requests
        owners = [requests, *others]
        self._all = owners
        self._extending = _with_method(owners, "extend")
        self._flushing = _with_method(owners, "flush")
        self._committing = _with_method(owners, "commit")
        self._telling = _with_method(owners, "part_of_results")
        self.with_inputs = [owner for owner in owners if owner.step_inputs]

    @property
    def step_inputs(self) -> list[StepInput]:
        """All declared step inputs. Raises ValueError for a name that two owners or the model's own inputs have."""
        inputs = [step_input for owner in self.with_inputs for step_input in owner.step_inputs]
        names = [step_input.name for step_input in inputs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"step inputs that several owners declare: {', '.join(twice)}. Names must be different.")
        reserved = sorted(MODEL_INPUT_NAMES.intersection(names))
        if reserved:
            raise ValueError(f"step inputs with names of the model's own inputs: {', '.join(reserved)}. Choose others.")
        return inputs

    def apply(self, output: SchedulerOutput, *, repeats: bool = False) -> dict[str, str]:
        """Bring the state up to this step: free slots first, then add, then extend, then one flush.

        repeats: the step's requests are those of a frame that was kept, and no other is named. Returns the requests
        that cannot run, with the reason.
        """
        if output.parts is not None:
            for owner in self._all:
                owner.begin(output)
        cached = output.scheduled_cached_reqs
        self._requests.note_computed(cached)
        if repeats and not cached.new_block_ids:
            return {}
        for req_id in output.finished_req_ids:
            self.remove(req_id)
        for req_id in output.preempted_req_ids:
            self.remove(req_id)
        errors: dict[str, str] = {}
        for request in output.scheduled_new_reqs:
            # An id that is still held is an update of that request: the old state goes, the new one comes.
            self.remove(request.req_id)
            error = self._add(request)
            if error is not None:
                errors[request.req_id] = error
        self._extend(output, errors)
        if output.scheduled_spec_decode_tokens:
            self._take_drafts(output, errors)
        for owner in self._flushing:
            owner.flush()
        return errors

    def remove(self, req_id: str) -> None:
        """Let go of a request, if it is here."""
        slot = self._requests.free_slot(req_id)
        if slot is not None:
            for owner in self._all:
                owner.remove(slot)

    def use_kv_cache(self, kv_cache: PagedKVCache) -> None:
        """Give all of them the runner's KV cache."""
        for owner in self._all:
            owner.use_kv_cache(kv_cache)

    def parts_of_results(self, output: SchedulerOutput) -> Parts | None:
        """The parts that owners have for a step's results."""
        if not self._telling:
            return None
        parts = (owner.part_of_results(output) for owner in self._telling)
        return Parts.of(part for part in parts if part is not None) or None

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        """Let all take in what the step has computed and sampled."""
        for owner in self._committing:
            owner.commit(frame, outcome)

    def commit_computed(self, frame: Frame) -> None:
        """The first half of `commit`."""
        for owner in self._all:
            owner.commit_computed(frame)

    def commit_sampled(self, frame: Frame, outcome: StepOutcome) -> None:
        """The second half of `commit`."""
        for owner in self._all:
            owner.commit_sampled(frame, outcome)

    def dummy(self, frame: Frame) -> None:
        """Run what owners run after a step, for no request."""
        for owner in self._all:
            owner.dummy(frame)

    def _add(self, request: NewRequestData) -> str | None:
        slot = self._requests.take_slot(request.req_id)
        try:
            for owner in self._all:
                owner.add(slot, request)
        except Exception as error:  # whatever one request brings, the others go on
            self._requests.free_slot(request.req_id)
            for owner in self._all:
                owner.rollback(slot)
            logger.exception("Request %s could not be added", request.req_id)
            return f"{type(error).__name__}: {error}"
        return None

    def _extend(self, output: SchedulerOutput, errors: dict[str, str]) -> None:
        cached = output.scheduled_cached_reqs
        slot_of = self._requests.slot_of
        if not all(map(slot_of.__contains__, cached.req_ids)):
            why = "the worker does not hold this request: adding it failed in an earlier step"
            errors |= {req_id: why for req_id in cached.req_ids if req_id not in slot_of}
        # Between two new blocks there are as many steps as a block has positions.
        if not cached.new_block_ids or cached.new_block_ids.count(None) == len(cached.new_block_ids):
            return
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None and req_id in slot_of:
                for owner in self._extending:
                    owner.extend(slot_of[req_id], block_ids)

    def _take_drafts(self, output: SchedulerOutput, errors: dict[str, str]) -> None:
        most = self._requests.max_drafts
        for req_id, token_ids in output.scheduled_spec_decode_tokens.items():
            if len(token_ids) > most:
                errors[req_id] = f"the step has {len(token_ids)} drafts of this request; this worker takes up to {most}"
            elif req_id in self._requests.slot_of:
                self._requests.set_drafts(self._requests.slot_of[req_id], token_ids)


def _with_method(owners: Sequence[SlotOwner], method: str) -> list[SlotOwner]:
    return [owner for owner in owners if getattr(type(owner), method) is not getattr(SlotOwner, method)]
