"""One step while it is put together, and what the scheduler remembers of it until its results arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.contract import CachedRequestData, NewRequestData, SchedulerOutput
from penstock.scheduler.block_pool import KVCacheBlock
from penstock.scheduler.request import Request


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """A request's part in a step in flight.

    num_computed_tokens: positions whose KV is in the cache after the step; an upper bound where there are drafts, or
        where an earlier step in flight had some.
    max_new_tokens: that the step samples for it, one more than there are drafts; 0 for a chunk that ends before the
        last known token, and where nothing is sampled.
    found, shared: blocks that it found when it began, and those that others may find since this step was scheduled.
    is_void: it read what another request should have computed and did not; its results mean nothing.
    """

    request: Request
    num_computed_tokens: int
    max_new_tokens: int
    found: Sequence[KVCacheBlock] = ()
    shared: Sequence[KVCacheBlock] = ()
    is_void: bool = False


class StepBuilder:
    """Collects what one step runs, within its budget of tokens.

    max_num_reqs: that it may run. is_all_decodes: whether every request so far has run a single token, and sampled one.
    waits_for_blocks: whether a request stays out since its blocks become free with the steps in flight; those after it
        must not take them.
    """

    __slots__ = (
        "_cached_req_ids",
        "_drafts",
        "_new_block_ids",
        "_new_reqs",
        "_num_computed_tokens",
        "_num_scheduled_tokens",
        "_token_budget",
        "is_all_decodes",
        "max_num_reqs",
        "preempted_req_ids",
        "scheduled",
        "step_id",
        "token_budget",
        "waits_for_blocks",
    )

    def __init__(self, step_id: int, token_budget: int, max_num_reqs: int) -> None:
        self.step_id = step_id
        self.max_num_reqs = max_num_reqs
        self.token_budget = self._token_budget = token_budget
        self.is_all_decodes = True
        self.waits_for_blocks = False
        self.scheduled: dict[str, ScheduledRequest] = {}
        self.preempted_req_ids: set[str] = set()
        self._num_scheduled_tokens: dict[str, int] = {}
        self._drafts: dict[str, list[int]] = {}
        self._new_reqs: list[NewRequestData] = []
        self._cached_req_ids: list[str] = []
        self._new_block_ids: list[tuple[list[int], ...] | None] = []
        self._num_computed_tokens: list[int] = []

    def add_new(
        self,
        request: Request,
        num_tokens: int,
        block_ids: tuple[list[int], ...],
        found: Sequence[KVCacheBlock],
        shared: Sequence[KVCacheBlock],
    ) -> None:
        """Run tokens of a request that the worker does not hold; `block_ids` are all its blocks."""
        new = NewRequestData(
            req_id=request.req_id,
            prompt_token_ids=request.prompt_token_ids,
            prefill_token_ids=request.all_token_ids.copy(),
            sampling_params=request.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
        )
        self._launch(request, num_tokens, found, shared)
        self._new_reqs.append(new)

    def add_cached(
        self,
        request: Request,
        num_tokens: int,
        new_block_ids: tuple[list[int], ...] | None,
        shared: Sequence[KVCacheBlock] = (),
    ) -> None:
        """Run tokens of a request that the worker holds; `new_block_ids` are None if it got none."""
        num_computed_tokens = request.num_computed_tokens
        self._launch(request, num_tokens, (), shared)
        self._cached_req_ids.append(request.req_id)
        self._new_block_ids.append(new_block_ids)
        self._num_computed_tokens.append(num_computed_tokens)

    @property
    def can_take_others(self) -> bool:
        """Whether it runs nothing so far, and nobody waits for blocks or had to give some away."""
        return not (self.scheduled or self.waits_for_blocks or self.preempted_req_ids)

    @property
    def is_full(self) -> bool:
        """Whether it has as many requests as it may have."""
        return len(self.scheduled) >= self.max_num_reqs

    @property
    def has_drafts(self) -> bool:
        """Whether any request has tokens to be verified."""
        return bool(self._drafts)

    @property
    def cached_only(self) -> tuple[list[str], dict[str, int]] | None:
        """What the message names of requests that the worker holds, and their tokens; None if there are others."""
        return None if self._new_reqs else (self._cached_req_ids, self._num_scheduled_tokens)

    def build(
        self, finished_req_ids: set[str], num_drafts_wanted: int, *, clears_blocks: bool = False
    ) -> SchedulerOutput:
        """The message to the worker."""
        new_block_ids = self._new_block_ids
        return SchedulerOutput(
            step_id=self.step_id,
            scheduled_new_reqs=self._new_reqs,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=self._cached_req_ids,
                new_block_ids=[] if new_block_ids.count(None) == len(new_block_ids) else new_block_ids,
                num_computed_tokens=self._num_computed_tokens,
            ),
            num_scheduled_tokens=self._num_scheduled_tokens,
            total_num_scheduled_tokens=self._token_budget - self.token_budget,
            scheduled_spec_decode_tokens=self._drafts,
            num_drafts_wanted=num_drafts_wanted,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
            clears_blocks=clears_blocks,
        )

    def _launch(
        self, request: Request, num_tokens: int, found: Sequence[KVCacheBlock], shared: Sequence[KVCacheBlock]
    ) -> None:
        """Move the request ahead as if the step were done and all its drafts accepted.

        The tokens that it samples are placeholders until then.
        """
        num_computed_tokens = request.num_computed_tokens + num_tokens
        num_placeholders = request.num_output_placeholders
        max_new_tokens = num_computed_tokens + 1 - len(request.all_token_ids) - num_placeholders
        req_id = request.req_id
        if max_new_tokens > 1:
            self._drafts[req_id] = request.spec_token_ids[: max_new_tokens - 1]
        elif max_new_tokens < 1 or request.pools:
            max_new_tokens = 0
        request.num_computed_tokens = num_computed_tokens
        request.num_output_placeholders = num_placeholders + max_new_tokens
        request.num_in_flight_steps += 1
        self.scheduled[req_id] = ScheduledRequest(request, num_computed_tokens, max_new_tokens, found, shared)
        self._num_scheduled_tokens[req_id] = num_tokens
        self.token_budget -= num_tokens
        if num_tokens != 1 or max_new_tokens != 1:
            self.is_all_decodes = False


def void_what_read_lost_blocks(
    failed: set[Request], steps: Iterable[dict[str, ScheduledRequest]]
) -> tuple[set[KVCacheBlock], set[Request]]:
    """Requests in `failed` computed nothing since the first of `steps`, which are all steps since then, in order.

    Makes void, in place, what other requests computed from blocks that these should have filled, and so on. Returns
    the blocks that do not hold what they were shared for, and the requests that read them.
    """
    lost_blocks: set[KVCacheBlock] = set()
    misled: set[Request] = set()
    for step in steps:
        # In the order in which they were scheduled: whoever found a block comes after whoever shared it.
        for req_id, entry in step.items():
            request = entry.request
            if request not in failed:
                if request not in misled and lost_blocks.isdisjoint(entry.found):
                    continue
                misled.add(request)
                step[req_id] = msgspec.structs.replace(entry, is_void=True)
            lost_blocks.update(entry.shared)
    return lost_blocks, misled
