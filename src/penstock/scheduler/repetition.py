"""Repetition of decode steps: which step repeats the last one, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from penstock.config import SchedulerConfig
from penstock.contract import CachedRequestData, Parts
from penstock.scheduler.draft_budget import DraftBudget
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.request import Request
from penstock.scheduler.request_lists import RequestLists
from penstock.scheduler.step import NewBlockIds, Step
from penstock.scheduler.steps_in_flight import StepsInFlight


class RepeatedSteps:
    """Decode steps that can be repeated, one per microbatch, in round-robin order.

    A step is repeated while the request lists stay as they were (`RequestLists.version`), no request has draft tokens,
    and the parts of its message allow it. `next_step` repeats the step whose turn it is; `note` takes every step that
    is scheduled, repeated or new.

    break_off: ends a request after an exception. runs_ahead: asynchronous scheduling.
    num_microbatches: steps that workers execute at once.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestLists,
        in_flight: StepsInFlight,
        kv_cache: KVCacheManager,
        draft_budget: DraftBudget,
        break_off: Callable[[Request, Exception], None],
        *,
        runs_ahead: bool,
        num_microbatches: int,
    ) -> None:
        self._is_enabled = config.fast_paths != "off"
        self._max_num_seqs = config.max_num_seqs
        self._requests = requests
        self._in_flight = in_flight
        self._kv_cache = kv_cache
        self._draft_budget = draft_budget
        self._break_off = break_off
        self._runs_ahead = runs_ahead
        self._num_microbatches = num_microbatches
        self._version = requests.version
        self._decodes: list[_Decodes] = []

    def next_step(self, step_id: int) -> Step | None:
        """Repeat the last decode step of the next microbatch; None if a new step must be built."""
        self._drop_outdated()
        if not self._decodes:
            return None
        num_requests = 0
        for decodes in self._decodes:
            num_requests += len(decodes.step.requests)
        decodes = self._decodes[0]
        if num_requests != len(self._requests.running) or decodes.num_left <= 0:
            return None
        if not self._runs_ahead and decodes.step.message.step_id in self._in_flight.steps:
            return None
        new_block_ids: NewBlockIds = []
        rows = decodes.due.get(decodes.num_left)
        if rows is not None:
            if (allocated := self._allocate_for(decodes.step, rows)) is None:
                return None
            new_block_ids = allocated
        return decodes.repeated(step_id, new_block_ids, self._version, clears_blocks=self._in_flight.had_nan)

    def note(self, step: Step) -> Step:
        """Note a step with its parts before its launch; return it without a step to repeat if its parts forbid that."""
        message = step.message
        if message.parts is not None and not _allow_repetition(message.parts):
            self.end()
            return replace(step, message=replace(message, repeats_step_id=None))
        if self._decodes and step.requests is self._decodes[0].step.requests:
            self._decodes[0].advance(step)
            if len(self._decodes) > 1:
                self._decodes.append(self._decodes.pop(0))
        elif self._can_be_repeated(step):
            self._begin(step)
        else:
            self.end()
        return step

    def end(self) -> None:
        """End the repetition: the next step is built anew."""
        self._decodes.clear()

    def _drop_outdated(self) -> None:
        """Drop all decode steps if the request lists have changed since the first of them."""
        version = self._requests.version
        if version != self._version:
            self._version = version
            self._decodes.clear()

    def _can_be_repeated(self, step: Step) -> bool:
        """Whether the step can be repeated: its requests can only decode again."""
        if not self._is_enabled or not step.is_all_decodes:
            return False
        # Steps with draft tokens differ in their numbers of tokens.
        if self._runs_ahead and step.message.num_drafts_wanted:
            return False
        if any(launched.message.scheduled_spec_decode_tokens for launched in self._in_flight.steps.values()):
            return False
        num_running = len(self._requests.running)
        runs_all = len(step.requests) == num_running or self._num_microbatches > 1
        # New requests come last in their step, and later ones in the order of the running requests.
        if step.message.scheduled_new_reqs and runs_all and num_running == len(step.requests):
            runs_all = step.requests == self._requests.running
        can_admit = num_running < self._max_num_seqs and self._requests.waiting.peek() is not None
        return runs_all and not can_admit and all(_allow_repetition(request.parts) for request in step.requests)

    def _begin(self, step: Step) -> None:
        """Add a new step to the round; it replaces earlier ones with any of its requests."""
        self._drop_outdated()
        if self._decodes:
            now = set(step.requests)
            self._decodes = [before for before in self._decodes if now.isdisjoint(before.step.requests)]
        num_steps = self._draft_budget.num_steps_planned - 1
        self._decodes.append(_Decodes(step, num_steps))

    def _allocate_for(self, step: Step, rows: list[int]) -> NewBlockIds | None:
        """Allocate a block of each group for these rows of a step; None if that needed a preemption."""
        if not self._kv_cache.can_decode(len(rows)):
            return None
        new_block_ids: NewBlockIds = [None] * len(step.requests)
        for row in rows:
            request = step.requests[row]
            try:
                new_block_ids[row] = self._kv_cache.allocate_slots(request, 1)
            except Exception as error:
                self._break_off(request, error)
                # No message will have the new blocks of the rows before it.
                for named in rows[: rows.index(row)]:
                    self._in_flight.rewind_between_steps(step.requests[named])
                return None
        return new_block_ids


def _allow_repetition(parts: Parts | None) -> bool:
    return parts is None or parts.may_repeat


class _Decodes:
    """Decode steps of the same requests, one token each: all requests that run, or one microbatch of several.

    step: the last one. num_left: how often it may be repeated, until a request reaches its length limit.
    due: rows by the value of `num_left` at which they need a block for the next step.
    """

    __slots__ = ("_end_token_ids", "due", "num_left", "step")

    def __init__(self, step: Step, num_steps: int) -> None:
        """num_steps: steps until the draft budget decides again."""
        self.step = step
        self._end_token_ids = frozenset().union(*{request.end_token_ids for request in step.requests})
        rows = zip(step.requests, step.num_computed_tokens, strict=True)
        self.num_left = min(num_steps, *(request.length_limit - 1 - num_tokens for request, num_tokens in rows))
        self.due: dict[int, list[int]] = {}
        self._note_capacity(range(len(step.requests)))

    def repeated(
        self, step_id: int, new_block_ids: NewBlockIds, version: tuple[int, int], *, clears_blocks: bool
    ) -> Step:
        """Return the next step.

        Its message refers to the last step, unless some requests were new to the worker in that one.
        """
        step = self.step
        message, req_ids, num_computed_tokens = step.message, step.req_ids, step.num_computed_tokens
        repeats_step_id = None if message.scheduled_new_reqs else message.step_id
        if message.repeats_step_id is None:
            message = replace(message, scheduled_new_reqs=[], finished_req_ids=set(), preempted_req_ids=set())
        message = replace(
            message,
            step_id=step_id,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=req_ids, new_block_ids=new_block_ids, num_computed_tokens=num_computed_tokens
            ),
            repeats_step_id=repeats_step_id,
            clears_blocks=clears_blocks,
            parts=None,
        )
        return Step(
            message,
            step.requests,
            req_ids,
            [count + 1 for count in num_computed_tokens],
            step.max_new_tokens,
            version if self.num_left > 1 else None,
            self._end_token_ids,
        )

    def advance(self, step: Step) -> None:
        """Note the step that repeats the last one."""
        self.step = step
        rows = self.due.pop(self.num_left, None)
        self.num_left -= 1
        if rows is not None:
            self._note_capacity(rows)

    def _note_capacity(self, rows: Iterable[int]) -> None:
        requests, num_computed_tokens, num_left = self.step.requests, self.step.num_computed_tokens, self.num_left
        for row in rows:
            num_steps = requests[row].kv_capacity - num_computed_tokens[row]
            self.due.setdefault(num_left - num_steps, []).append(row)
