"""Steps: a step in flight as parallel lists, and its builder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import sub
from types import MappingProxyType
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.contract import CachedRequestData, NewRequestData, SchedulerOutput
from penstock.scheduler.block_pool import KVCacheBlock
from penstock.scheduler.kv_cache_manager import PrefixHit
from penstock.scheduler.request import Request

# New block ids per row of a step and KV cache group; empty where no request gets any.
NewBlockIds: TypeAlias = list[tuple[list[int], ...] | None]
_NO_BLOCKS: Mapping[int, Sequence[KVCacheBlock]] = MappingProxyType({})


class Step(msgspec.Struct, gc=False):
    """Step with tokens, from launch to results: parallel lists of its requests, in scheduling order.

    Steps that repeat one another, and their messages, share equal lists: no list changes after the launch.

    num_computed_tokens: per request, positions whose KV is in the cache after the step; an upper bound with draft
        tokens in this step or an earlier one in flight.
    max_new_tokens: per request, draft tokens plus one; 0 for a prefill chunk that ends before the last known token, and
        for pooling.
    found, shared: by row, blocks of the request's prefix-cache hit, and blocks cached when this step was scheduled.
    void_rows: rows that read blocks which a failed request did not fill; their results are dropped.
    goes_on_at: of a step that repeats another, the version of the request lists for which only a token of
        `end_token_ids` ends one of its requests; None if lengths may end them.
    """

    message: SchedulerOutput
    requests: list[Request]
    req_ids: list[str]
    num_computed_tokens: list[int]
    max_new_tokens: list[int]
    goes_on_at: tuple[int, int] | None = None
    end_token_ids: frozenset[int] = frozenset()
    found: Mapping[int, Sequence[KVCacheBlock]] = _NO_BLOCKS
    shared: Mapping[int, Sequence[KVCacheBlock]] = _NO_BLOCKS
    void_rows: frozenset[int] = frozenset()

    @property
    def is_all_decodes(self) -> bool:
        """Whether the step has requests, and each decodes one token."""
        num_reqs = len(self.requests)
        return self.message.total_num_scheduled_tokens == num_reqs > 0 and self.max_new_tokens.count(1) == num_reqs

    def reordered(self, rows: Sequence[int]) -> Step:
        """Return the step with its rows in the order of its results."""
        return replace(
            self,
            requests=[self.requests[row] for row in rows],
            req_ids=[self.req_ids[row] for row in rows],
            num_computed_tokens=[self.num_computed_tokens[row] for row in rows],
            max_new_tokens=[self.max_new_tokens[row] for row in rows],
            found=_NO_BLOCKS,
            shared=_NO_BLOCKS,
            void_rows=frozenset(index for index, row in enumerate(rows) if row in self.void_rows),
        )


class StepBuilder:
    """Builder of one step within the token budget: requests that the worker holds, then new ones.

    max_num_reqs: limit of requests.
    waits_for_blocks: whether a request was left out until steps in flight free its blocks; later ones must not take
        them.
    """

    __slots__ = (
        "_awaiting_req_ids",
        "_drafts",
        "_found",
        "_max_new_tokens",
        "_new_block_ids",
        "_new_reqs",
        "_num_computed_tokens",
        "_num_tokens",
        "_sends_whole_parts",
        "_shared",
        "_step_id",
        "_token_budget",
        "max_num_reqs",
        "preempted_req_ids",
        "requests",
        "token_budget",
        "waits_for_blocks",
    )

    def __init__(self, step_id: int, token_budget: int, max_num_reqs: int, *, sends_whole_parts: bool = False) -> None:
        self._step_id = step_id
        self._sends_whole_parts = sends_whole_parts
        self.max_num_reqs = max_num_reqs
        self.token_budget = self._token_budget = token_budget
        self.waits_for_blocks = False
        self.preempted_req_ids: set[str] = set()
        self.requests: list[Request] = []
        self._num_computed_tokens: list[int] = []
        self._max_new_tokens: list[int] = []
        self._found: dict[int, Sequence[KVCacheBlock]] = {}
        self._shared: dict[int, Sequence[KVCacheBlock]] = {}
        self._num_tokens: list[int] = []
        self._drafts: dict[str, list[int]] = {}
        self._awaiting_req_ids: list[str] = []
        self._new_reqs: list[NewRequestData] = []
        self._new_block_ids: NewBlockIds = []

    def add_new(
        self,
        request: Request,
        num_tokens: int,
        block_ids: tuple[list[int], ...],
        hit: PrefixHit,
        shared: Sequence[KVCacheBlock],
    ) -> None:
        """Add a request that is new to the worker, after its prefix-cache hit.

        block_ids: all its blocks.
        """
        parts = request.parts
        if parts is not None and not self._sends_whole_parts:
            parts = parts.of_tokens_from(hit.num_tokens)
        new = NewRequestData(
            req_id=request.req_id,
            prompt_token_ids=request.prompt_token_ids,
            prefill_token_ids=request.all_token_ids.copy(),
            sampling_params=request.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=hit.num_tokens,
            parts=parts,
            pooling_params=request.pooling_params,
        )
        found = [block for blocks in hit.blocks for block in blocks]
        if found:
            self._found[len(self.requests)] = found
        self._add(request, hit.num_tokens, num_tokens, shared)
        self._new_reqs.append(new)

    def add_cached(
        self,
        request: Request,
        num_tokens: int,
        new_block_ids: tuple[list[int], ...] | None,
        shared: Sequence[KVCacheBlock] = (),
    ) -> None:
        """Add a request that the worker holds. new_block_ids: None without new blocks."""
        self._add(request, request.num_computed_tokens, num_tokens, shared)
        self._new_block_ids.append(new_block_ids)

    @property
    def can_take_others(self) -> bool:
        """Whether the step is empty, and no request waits for blocks or was preempted."""
        return not (self.requests or self.waits_for_blocks or self.preempted_req_ids)

    @property
    def is_full(self) -> bool:
        """Whether the limit of requests is reached."""
        return len(self.requests) >= self.max_num_reqs

    def build(self, finished_req_ids: set[str], num_drafts_wanted: int, *, clears_blocks: bool = False) -> Step:
        """Return the step with its message to the worker."""
        new_block_ids = self._new_block_ids
        req_ids = [request.req_id for request in self.requests]
        # Cached requests come first.
        num_cached = len(new_block_ids)
        message = SchedulerOutput(
            step_id=self._step_id,
            scheduled_new_reqs=self._new_reqs,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=req_ids[:num_cached] if self._new_reqs else req_ids,
                new_block_ids=[] if new_block_ids.count(None) == num_cached else new_block_ids,
                num_computed_tokens=list(map(sub, self._num_computed_tokens[:num_cached], self._num_tokens)),
            ),
            num_scheduled_tokens=dict(zip(req_ids, self._num_tokens)),  # noqa: B905, as in `StepsInFlight.settle`
            total_num_scheduled_tokens=self._token_budget - self.token_budget,
            scheduled_spec_decode_tokens=self._drafts,
            num_drafts_wanted=num_drafts_wanted,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
            awaiting_req_ids=self._awaiting_req_ids,
            clears_blocks=clears_blocks,
        )
        return Step(
            message,
            self.requests,
            req_ids,
            self._num_computed_tokens,
            self._max_new_tokens,
            found=self._found,
            shared=self._shared,
        )

    def _add(self, request: Request, num_computed_tokens: int, num_tokens: int, shared: Sequence[KVCacheBlock]) -> None:
        """Add a row, counted as if all draft tokens were accepted. The launch advances the request."""
        num_computed_tokens += num_tokens
        max_new_tokens = num_computed_tokens + 1 - len(request.all_token_ids) - request.num_output_placeholders
        if num_tokens != 1 or max_new_tokens != 1 or request.pools:
            if max_new_tokens > 1:
                self._drafts[request.req_id] = request.spec_token_ids[: max_new_tokens - 1]
            elif max_new_tokens < 1 or request.pools:
                max_new_tokens = 0
        if request.awaits_parts and max_new_tokens:
            self._awaiting_req_ids.append(request.req_id)
        if shared:
            self._shared[len(self.requests)] = shared
        self.requests.append(request)
        self._num_tokens.append(num_tokens)
        self._num_computed_tokens.append(num_computed_tokens)
        self._max_new_tokens.append(max_new_tokens)
        self.token_budget -= num_tokens


def void_rows_that_read_lost_blocks(
    failed: set[Request], steps: Iterable[Step]
) -> tuple[set[KVCacheBlock], set[Request]]:
    """Void the rows that read blocks which failed requests did not fill, transitively.

    steps: all steps since the failure, in order. Returns the blocks without their content, and the requests that read
    them.
    """
    lost_blocks: set[KVCacheBlock] = set()
    misled: set[Request] = set()
    for step in steps:
        # A request comes after those whose blocks it found.
        for row, request in enumerate(step.requests):
            if request not in failed:
                if request not in misled and lost_blocks.isdisjoint(step.found.get(row, ())):
                    continue
                misled.add(request)
                step.void_rows |= {row}
            lost_blocks.update(step.shared.get(row, ()))
    return lost_blocks, misled
