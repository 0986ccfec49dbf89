"""Owners of per-slot state: the interface, and their list in one runner.

A feature with state per request is an owner: it is called when a request takes a slot, gets blocks and leaves; it
fills the step inputs that it has declared, and commits each step's outcome.
"""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

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

    shape: of one row. padding: value in padding rows.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    padding: float = 0


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

    def has_work(self, slots_np: np.ndarray) -> bool:
        """Whether a request in these slots needs the owner's step inputs. Equal on all ranks.

        Called once for a frame that is kept.
        """
        return False

    def fill(self, frame: Frame) -> None:  # noqa: B027
        """Write the step inputs, `frame.inputs.named`, except padding rows. Called where `has_work` is true."""

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:  # noqa: B027
        """Commit the step's computed and sampled tokens. The next step overwrites the frame's tensors."""

    def commit_computed(self, frame: Frame) -> None:  # noqa: B027
        """The first half of `commit` on a pipeline stage that does not sample: as if all drafts were accepted."""

    def commit_sampled(self, frame: Frame, outcome: StepOutcome) -> None:
        """The second half of `commit`, once the outcome is received."""
        self.commit(frame, outcome)

    def part_of_results(self, output: SchedulerOutput) -> Part | None:
        """Return this feature's part of the step's results for its scheduler side, or None."""
        return None

    def dummy(self, frame: Frame) -> None:  # noqa: B027
        """Run the collectives and kernels of `commit` after a step without requests."""


# Makes an owner for a runner, or None where its model needs none: (device, number of slots, model).
SlotOwnerFactory: TypeAlias = Callable[[Device, int, LanguageModel], SlotOwner | None]

_Owner = TypeVar("_Owner", bound=SlotOwner)

# Names of `ModelInputs`, which programs know as step inputs, too.
MODEL_INPUT_NAMES = frozenset({"token_ids", "positions", "inputs_embeds", "hidden_states"})

_registered: list[SlotOwnerFactory] = []
_NONE_REFUSED: Mapping[str, str] = {}


def register_slot_owner(factory: SlotOwnerFactory) -> None:
    """Register an owner for every worker's runner. Plugins register functions or classes of their modules.

    Raises ConfigError for a lambda or a nested function.
    """
    register_once(_registered, factory)


def registered_slot_owners() -> Sequence[SlotOwnerFactory]:
    """Factories registered by plugins, in this order."""
    return tuple(_registered)


class SlotOwners:
    """The owners of one runner. A request is added to all of them or to none.

    requests: the first owner, which assigns the slots.
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

    def of_type(self, kind: type[_Owner]) -> _Owner | None:
        """The owner of this class; None without one."""
        return next((owner for owner in self._all if isinstance(owner, kind)), None)

    @property
    def step_inputs(self) -> list[StepInput]:
        """All declared step inputs. Raises ValueError for a name that two owners or the model's own inputs have."""
        inputs = [step_input for owner in self.with_inputs for step_input in owner.step_inputs]
        names = [step_input.name for step_input in inputs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"Step inputs declared by several owners: {', '.join(twice)}. Names must be different.")
        reserved = sorted(MODEL_INPUT_NAMES.intersection(names))
        if reserved:
            raise ValueError(f"Step inputs with names of the model's own inputs: {', '.join(reserved)}. Choose others.")
        return inputs

    def apply(
        self, output: SchedulerOutput, refused: Mapping[str, str] = _NONE_REFUSED, *, repeats: bool = False
    ) -> dict[str, str]:
        """Apply a step's message to the state: free slots first, then add, then extend, then one flush.

        refused: reasons by request whose message is not valid; it is neither added nor extended.
        repeats: the step repeats a kept frame, and names no other request. Returns reasons by request that cannot run.
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
        errors = dict(refused)
        for request in output.scheduled_new_reqs:
            # A known id is an update of that request: its old state is removed first.
            self.remove(request.req_id)
            error = None if request.req_id in refused else self._add(request)
            if error is not None:
                errors[request.req_id] = error
        self._extend(output, errors)
        if output.scheduled_spec_decode_tokens:
            self._take_drafts(output, errors)
        for owner in self._flushing:
            owner.flush()
        return errors

    def remove(self, req_id: str) -> None:
        """Remove a request, if it has a slot."""
        slot = self._requests.free_slot(req_id)
        if slot is not None:
            for owner in self._all:
                owner.remove(slot)

    def use_kv_cache(self, kv_cache: PagedKVCache) -> None:
        """Pass the runner's KV cache to all owners."""
        for owner in self._all:
            owner.use_kv_cache(kv_cache)

    def parts_of_results(self, output: SchedulerOutput) -> Parts | None:
        """The owners' parts of a step's results."""
        if not self._telling:
            return None
        parts = (owner.part_of_results(output) for owner in self._telling)
        return Parts.of(part for part in parts if part is not None) or None

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        """Call `commit` of all owners."""
        for owner in self._committing:
            owner.commit(frame, outcome)

    def commit_computed(self, frame: Frame) -> None:
        """Call `commit_computed` of all owners."""
        for owner in self._all:
            owner.commit_computed(frame)

    def commit_sampled(self, frame: Frame, outcome: StepOutcome) -> None:
        """Call `commit_sampled` of all owners."""
        for owner in self._all:
            owner.commit_sampled(frame, outcome)

    def dummy(self, frame: Frame) -> None:
        """Call `dummy` of all owners."""
        for owner in self._all:
            owner.dummy(frame)

    def _add(self, request: NewRequestData) -> str | None:
        slot = self._requests.take_slot(request.req_id)
        try:
            for owner in self._all:
                owner.add(slot, request)
        except Exception as error:  # a bad request must not end the others
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
        # A request gets a new block only every block_size tokens.
        if not cached.new_block_ids or cached.new_block_ids.count(None) == len(cached.new_block_ids):
            return
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None and req_id in slot_of and req_id not in errors:
                for owner in self._extending:
                    owner.extend(slot_of[req_id], block_ids)

    def _take_drafts(self, output: SchedulerOutput, errors: dict[str, str]) -> None:
        most = self._requests.max_drafts
        for req_id, token_ids in output.scheduled_spec_decode_tokens.items():
            if len(token_ids) > most:
                errors[req_id] = f"the step has {len(token_ids)} drafts of this request; this worker takes up to {most}"
            elif req_id in self._requests.slot_of and req_id not in errors:
                self._requests.set_drafts(self._requests.slot_of[req_id], token_ids)


def _with_method(owners: Sequence[SlotOwner], method: str) -> list[SlotOwner]:
    return [owner for owner in owners if getattr(type(owner), method) is not getattr(SlotOwner, method)]
