"""Checks of the scheduler's messages, on the worker's side: every id and position before it becomes an address.

A message may come from a recording, or from a scheduler with an error. The checks follow the requests that the worker
holds by the messages alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.contract.kv_cache import KVCacheConfig
from penstock.contract.param_checks import shown
from penstock.contract.scheduler_output import NewRequestData, SamplingInput, SchedulerOutput
from penstock.errors import InvalidMessage


@dataclass(slots=True)
class _Request:
    """A request that the worker holds.

    lowest, highest: bounds of its computed tokens: as if all drafts were rejected, or accepted. num_blocks: by group.
    end: positions that its blocks have room for.
    """

    prefill_len: int
    lowest: int
    highest: int
    num_blocks: list[int]
    end: int = 0


@dataclass(slots=True)
class _Repetition:
    """Decode step that may be repeated. num_left: repetitions until a request needs a block or is at the limit.

    num_run: repetitions that are not counted in `_Request` yet.
    """

    req_ids: list[str]
    num_left: int
    num_run: int = 0


class CheckedStep(NamedTuple):
    """Result of a step's checks.

    may_repeat: whether the step is what its message claims, a repetition of the step that it names. errors: reasons by
    request that cannot run.
    """

    may_repeat: bool
    errors: Mapping[str, str]


_REPEATED = CheckedStep(may_repeat=True, errors={})


class _Wrong(Exception):
    """Error of one request of a step."""


@dataclass(slots=True)
class StepChecks:
    """The checks of one worker. max_num_reqs, max_num_tokens: of a step, and requests at once."""

    kv_cache_config: KVCacheConfig
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    vocab_size: int
    max_drafts: int
    _requests: dict[str, _Request] = field(default_factory=dict)
    # By the id of the last step.
    _repetitions: dict[int | None, _Repetition] = field(default_factory=dict)

    def check(self, step: SchedulerOutput) -> CheckedStep:
        """Check a step, and follow its requests. An error of a request is not one of the others.

        Raises InvalidMessage, and changes nothing then, for a step that contradicts itself or exceeds the limits.
        """
        claimed = step.repeats_step_id
        repetition = self._repetitions.get(claimed)
        if repetition is None or not _is_repetition(step, repetition):
            return CheckedStep(may_repeat=False, errors=self._check_whole(step))
        if step.scheduled_cached_reqs.new_block_ids or repetition.num_left <= repetition.num_run:
            errors = self._check_whole(step)
            return CheckedStep(may_repeat=not errors, errors=errors)
        repetition.num_run += 1
        self._repetitions[step.step_id] = self._repetitions.pop(claimed)
        return _REPEATED

    def hold(self, requests: Iterable[NewRequestData]) -> dict[str, str]:
        """Follow requests that the worker holds before the first step. Returns errors by request."""
        errors = {}
        for request in requests:
            try:
                self._requests[request.req_id] = self._new(request)
            except _Wrong as wrong:
                errors[request.req_id] = str(wrong)
        return errors

    def forget(self, req_ids: Iterable[str]) -> None:
        """Forget requests that could not be added."""
        for req_id in req_ids:
            self._requests.pop(req_id, None)

    def check_sampling(self, sampling: SamplingInput) -> None:
        """Raise InvalidMessage for parts that cannot be those of a step's sampling (`Part.check`)."""
        for part in (sampling.parts or {}).values():
            try:
                part.check(self.vocab_size)
            except InvalidMessage as error:
                raise InvalidMessage(f"Step {sampling.step_id} has {error}") from error

    def _check_whole(self, step: SchedulerOutput) -> dict[str, str]:
        """Check a step by all of its fields, and note what it changes. Returns errors by request."""
        cached, num_scheduled = step.scheduled_cached_reqs, step.num_scheduled_tokens
        self._count_repetitions()
        req_ids = [*(request.req_id for request in step.scheduled_new_reqs), *cached.req_ids]
        if len(req_ids) != len(num_scheduled) or num_scheduled.keys() != set(req_ids):
            raise _invalid(step, "num_scheduled_tokens", list(num_scheduled), "the step's requests, each once")
        if num_scheduled and min(num_scheduled.values()) < 1:
            raise _invalid(step, "num_scheduled_tokens", num_scheduled, "at least 1 of each request")
        num_tokens, num_reqs = sum(num_scheduled.values()), len(cached.req_ids)
        if num_tokens > self.max_num_tokens:
            raise _invalid(step, "num_scheduled_tokens", f"{num_tokens} tokens", f"at most {self.max_num_tokens}")
        if not step.scheduled_spec_decode_tokens.keys() <= num_scheduled.keys():
            found = list(step.scheduled_spec_decode_tokens)
            raise _invalid(step, "scheduled_spec_decode_tokens", found, "the step's requests")
        if self.max_drafts and not 0 <= step.num_drafts_wanted <= self.max_drafts:
            raise _invalid(step, "num_drafts_wanted", step.num_drafts_wanted, f"0 to {self.max_drafts}")
        if len(cached.num_computed_tokens) != num_reqs or len(cached.new_block_ids) not in (0, num_reqs):
            raise _invalid(step, "scheduled_cached_reqs", cached, "lists of equal length")
        gone = step.finished_req_ids | step.preempted_req_ids
        num_held = len(self._requests.keys() - gone | {request.req_id for request in step.scheduled_new_reqs})
        if num_held > self.max_num_reqs:
            raise _invalid(step, "scheduled_new_reqs", f"{num_held} requests at once", f"{self.max_num_reqs} at once")

        errors: dict[str, str] = {}
        changed: dict[str, _Request] = {}
        for new in step.scheduled_new_reqs:
            try:
                request = changed[new.req_id] = self._new(new)
                self._schedule(step, new.req_id, request, new.num_computed_tokens)
            except _Wrong as wrong:
                errors[new.req_id] = str(wrong)
        blocks = cached.new_block_ids or [None] * num_reqs
        for req_id, num_computed, new_blocks in zip(cached.req_ids, cached.num_computed_tokens, blocks, strict=True):
            held = None if req_id in gone else self._requests.get(req_id)
            if held is None:
                continue  # adding it has failed: its slot is missing, which is its error
            try:
                self._continue(step, req_id, held, num_computed, new_blocks)
                changed[req_id] = held
            except _Wrong as wrong:
                errors[req_id] = str(wrong)
        self._note(step, gone, changed, errors)
        return errors

    def _continue(
        self,
        step: SchedulerOutput,
        req_id: str,
        request: _Request,
        num_computed: int,
        new_blocks: Sequence[Sequence[int]] | None,
    ) -> None:
        """Check the step's blocks and tokens of a request that the worker holds, and count them."""
        if new_blocks is not None:
            self._extend(request, new_blocks)
        if not request.lowest <= num_computed <= request.highest:
            raise _wrong("num_computed_tokens", num_computed, f"{request.lowest} to {request.highest}")
        is_decode = num_computed >= request.prefill_len and step.num_scheduled_tokens[req_id] == 1
        if is_decode and num_computed < request.end and req_id not in step.scheduled_spec_decode_tokens:
            request.lowest += 1
            request.highest = num_computed + 1
        else:
            self._schedule(step, req_id, request, num_computed)

    def _note(
        self, step: SchedulerOutput, gone: set[str], changed: dict[str, _Request], errors: Mapping[str, str]
    ) -> None:
        for req_id in (*gone, *(new.req_id for new in step.scheduled_new_reqs)):
            self._requests.pop(req_id, None)
        for req_id in errors:
            changed.pop(req_id, None)
        self._requests |= changed
        num_scheduled = step.num_scheduled_tokens
        if gone or step.scheduled_new_reqs:
            self._repetitions.clear()
        elif num_scheduled:
            # Steps of other requests that run meanwhile may be repeated.
            kept = self._repetitions.items()
            self._repetitions = {key: one for key, one in kept if num_scheduled.keys().isdisjoint(one.req_ids)}
        is_decode = sum(num_scheduled.values()) == len(num_scheduled) == len(changed) > 0
        if is_decode and all(request.highest >= request.prefill_len for request in changed.values()):
            num_left = min(request.end - request.highest for request in changed.values())
            self._repetitions[step.step_id] = _Repetition(list(num_scheduled), num_left)

    def _new(self, new: NewRequestData) -> _Request:
        tokens, num_computed = new.prefill_token_ids, new.num_computed_tokens
        if not len(new.prompt_token_ids) <= len(tokens) <= self.max_model_len:
            found = f"{len(new.prompt_token_ids)} and {len(tokens)} tokens"
            raise _wrong(
                "prompt_token_ids and prefill_token_ids", found, f"up to {self.max_model_len}, the prompt first"
            )
        for name, ids in (("prompt_token_ids", new.prompt_token_ids), ("prefill_token_ids", tokens)):
            _check_range(name, ids, 0, self.vocab_size)
        if not 0 <= num_computed < len(tokens):
            raise _wrong("num_computed_tokens", num_computed, f"0 to {len(tokens) - 1}")
        request = _Request(len(tokens), num_computed, num_computed, [0] * len(self.kv_cache_config.groups))
        self._extend(request, new.block_ids)
        return request

    def _extend(self, request: _Request, block_ids: Sequence[Sequence[int]]) -> None:
        groups = self.kv_cache_config.groups
        if len(block_ids) != len(groups):
            raise _wrong("block_ids", f"{len(block_ids)} lists", f"{len(groups)}, one of each KV-cache group")
        num_blocks = [count + len(ids) for count, ids in zip(request.num_blocks, block_ids, strict=True)]
        end = self.max_model_len
        for index, (count, ids, group) in enumerate(zip(num_blocks, block_ids, groups, strict=True)):
            _check_range("block_ids", ids, 0, self.kv_cache_config.num_blocks_of(index))
            width = group.spec.table_width(self.max_model_len)
            if count > width:
                raise _wrong("block_ids", f"{count} blocks", f"at most {width}")
            end = min(end, group.spec.capacity(count))
        request.num_blocks, request.end = num_blocks, end

    def _schedule(self, step: SchedulerOutput, req_id: str, request: _Request, num_computed: int) -> None:
        """Check the step's tokens of a request behind its computed ones, and count them."""
        drafts = step.scheduled_spec_decode_tokens.get(req_id, ())
        count = step.num_scheduled_tokens[req_id]
        end, num_drafts = num_computed + count, len(drafts)
        # A request that has computed its prefill knows one token more, which it has sampled.
        known = max(request.prefill_len, num_computed + 1)
        if end - num_drafts > known or num_drafts >= count or (num_drafts and end - num_drafts != known):
            found = f"{count}, {num_drafts} of them drafts, behind {num_computed}"
            raise _wrong("num_scheduled_tokens", found, f"the known ones, up to {known}, and then drafts")
        if num_drafts > self.max_drafts:
            raise _wrong("drafts", num_drafts, f"up to {self.max_drafts}")
        _check_range("drafts", drafts, -1, self.vocab_size)
        if end > request.end:
            raise _wrong("positions", end, f"{request.end}, for which it has blocks")
        request.lowest += count - num_drafts
        request.highest = end

    def _count_repetitions(self) -> None:
        for repetition in self._repetitions.values():
            for req_id in repetition.req_ids if repetition.num_run else ():
                self._requests[req_id].lowest += repetition.num_run
                self._requests[req_id].highest += repetition.num_run
            repetition.num_left -= repetition.num_run
            repetition.num_run = 0


def _is_repetition(step: SchedulerOutput, repetition: _Repetition) -> bool:
    """Whether a step has the requests of the one that it repeats, one token each, and nothing else."""
    has_more = (
        step.scheduled_new_reqs or step.finished_req_ids or step.preempted_req_ids or step.scheduled_spec_decode_tokens
    )
    num_reqs = len(repetition.req_ids)
    return (
        not has_more
        and len(step.num_scheduled_tokens) == sum(step.num_scheduled_tokens.values()) == num_reqs
        and step.scheduled_cached_reqs.req_ids == repetition.req_ids
    )


def _check_range(name: str, ids: Sequence[int], low: int, end: int) -> None:
    if ids and not (low <= min(ids) and max(ids) < end):
        raise _wrong(name, min(ids) if min(ids) < low else max(ids), f"{low} to {end - 1}")


def _wrong(name: str, value: Any, allowed: str) -> _Wrong:
    return _Wrong(f"{name}={value if isinstance(value, str) else shown(value)} is not valid. Allowed: {allowed}")


def _invalid(message: SchedulerOutput, name: str, value: Any, allowed: str) -> InvalidMessage:
    value = value if isinstance(value, str) else shown(value)
    return InvalidMessage(f"Step {message.step_id} has {name}: {value}. Allowed: {allowed}.")
