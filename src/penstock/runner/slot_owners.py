"""Slot owners of one runner: every request is added to all of them or to none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

from penstock.contract import NewRequestData, Part, SchedulerOutput
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.request_states import RequestStates
from penstock.runner.slot_owner import PendingPart, SlotOwner
from penstock.step.frame import Frame, WantedOutputs
from penstock.step.inputs import StepInput

logger = logging.getLogger(__name__)

_Owner = TypeVar("_Owner", bound=SlotOwner)
# Names of `ModelInputs`, which programs know as step inputs, too.
MODEL_INPUT_NAMES = frozenset({"token_ids", "positions", "inputs_embeds", "hidden_states"})


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
        self._reading = _with_method(owners, "reads_hidden")
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

    def apply(self, output: SchedulerOutput, refused: Mapping[str, str]) -> dict[str, str]:
        """Apply a step's message to the state: free slots first, then add, then extend, then one flush.

        refused: reasons by request whose message is not valid; it is neither added nor extended.
        Returns reasons by request that cannot run.
        """
        self._begin(output)
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
        self._flush()
        return errors

    def extend(self, output: SchedulerOutput) -> dict[str, str]:
        """Apply the message of a step that repeats a kept frame: its requests run on, with new blocks at most.

        Returns reasons by request that cannot run.
        """
        self._begin(output)
        errors: dict[str, str] = {}
        if output.scheduled_cached_reqs.new_block_ids:
            self._extend(output, errors)
            self._flush()
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

    def parts_of_results(self, frame: Frame) -> Sequence[Part | PendingPart]:
        """The owners' parts of a sampled step's results."""
        parts, frame.parts = frame.parts, ()
        if not self._telling:
            return parts
        told = (owner.part_of_results(frame.output) for owner in self._telling)
        return [*parts, *(part for part in told if part is not None)]

    def widen(self, wants: WantedOutputs, frame: Frame) -> WantedOutputs:
        """Add the hidden states that owners read to the outputs that a built frame wants, and note these owners."""
        frame.readers = ()
        for owner in self._reading:
            layers = owner.reads_hidden(frame)
            if layers is not None:
                frame.readers = (*frame.readers, owner)
                wants = wants._replace(all_rows=True, aux_layers=sorted({*wants.aux_layers, *layers}))
        return wants

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        """Call `commit` of all owners."""
        for owner in self._committing:
            owner.commit(frame, outcome)
        if frame.readers:
            parts = [owner.part_of_hidden(frame) for owner in frame.readers]
            frame.parts = [part for part in parts if part is not None]

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

    def _begin(self, output: SchedulerOutput) -> None:
        if output.parts is not None:
            for owner in self._all:
                owner.begin(output)
        self._requests.note_computed(output.scheduled_cached_reqs)

    def _flush(self) -> None:
        for owner in self._flushing:
            owner.flush()

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
