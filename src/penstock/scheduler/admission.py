"""Admission of waiting requests to what running ones leave of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock.config import SchedulerConfig
from penstock.scheduler.feature import Chunks, SchedulerFeature, methods_of
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.request import Request, RequestStatus, no_logprobs
from penstock.scheduler.request_lists import RequestLists
from penstock.scheduler.step import StepBuilder
from penstock.scheduler.steps_in_flight import StepsInFlight


class Admission:
    """Admits waiting requests in the order of the queue, each with room for all its known tokens.

    A request that must wait keeps those after it waiting, unless it is not ready or a feature skips it.

    features: may skip a request, or keep it and those after it from a step. break_off: ends a request after an
        exception.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestLists,
        in_flight: StepsInFlight,
        kv_cache: KVCacheManager,
        features: Sequence[SchedulerFeature],
        chunks: Chunks,
        break_off: Callable[[Request, Exception], None],
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._runs_chunks = config.enable_chunked_prefill
        self._requests = requests
        self._in_flight = in_flight
        self._kv_cache = kv_cache
        self._begin_methods = methods_of(features, "begin_admission")
        self._skip_methods = methods_of(features, "skips")
        self._admit_methods = methods_of(features, "admits")
        self._chunks = chunks
        self._break_off = break_off

    def admit_to(self, step: StepBuilder) -> None:
        """Add waiting requests to a step, after all running ones."""
        for begin_admission in self._begin_methods:
            begin_admission(self._requests.running)
        while step.token_budget > 0 and not step.is_full and len(self._requests.running) < self._max_num_seqs:
            request = self._requests.waiting.peek()
            if request is None:
                return
            if self._skip_methods and self._is_skipped(request):
                continue
            try:
                if not self._admit(request, step) and not self._take_reserved_blocks(request):
                    return
            except Exception as error:
                self._break_off(request, error)

    def _is_skipped(self, request: Request) -> bool:
        """Whether a feature skips the first waiting request, which then waits until the feature is ready for it."""
        reason = next((why for skips in self._skip_methods if (why := skips(request)) is not None), None)
        if reason is not None:
            self._requests.wait_for(request.req_id, reason, is_there=False)
        return reason is not None

    def _take_reserved_blocks(self, request: Request) -> bool:
        """Free the reserved blocks of the newest other waiting request if nothing runs; whether there was one."""
        if self._requests.running or self._in_flight.steps:
            return False
        for holder in self._requests.waiting_holders():
            if holder is not request and not holder.waits_for:
                self._in_flight.note_loaded(holder, 0)
                return True
        return False

    def _admit(self, request: Request, step: StepBuilder) -> bool:
        """Admit the first waiting request to the step; False if it must wait, and all others after it."""
        # After a preemption, tokens in flight belong to what must be computed again.
        if request.status is RequestStatus.PREEMPTED and self._in_flight.holds(request):
            return False
        hit = self._kv_cache.get_computed_blocks(request)
        if not self._kv_cache.has_room_for(request, hit):
            return False
        if not all(admits(request, step.requests) for admits in self._admit_methods):
            return False
        num_tokens = min(request.num_tokens - hit.num_tokens, step.token_budget)
        if self._chunks.are_limited:
            num_tokens = self._chunks.length(request, hit.num_tokens, num_tokens)
        if not num_tokens or (num_tokens < request.num_tokens - hit.num_tokens and not self._runs_chunks):
            return False
        if self._kv_cache.allocate_slots(request, num_tokens, hit) is None:
            return False
        self._requests.waiting.admit(self._requests.running)
        request.has_news = True
        # After a preemption within the prompt they start again.
        request.prompt_logprobs = no_logprobs() if request.needs_prompt_logits else None
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = hit.num_tokens
            request.first_scheduled_time = time.monotonic()
        shared = self._kv_cache.share_next(request, hit.num_tokens, num_tokens)
        step.add_new(request, num_tokens, self._kv_cache.get_block_ids(request.req_id), hit, shared)
        # Last, since it means that the worker holds the request.
        request.status = RequestStatus.RUNNING
        return True
