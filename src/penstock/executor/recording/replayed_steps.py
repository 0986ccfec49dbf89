"""Steps of a recording as new workers need them: requests that they do not hold yet are computed first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from penstock.contract import (
    AttentionSpec,
    CachedRequestData,
    CrossAttentionSpec,
    KVCacheConfig,
    ModelRunnerOutput,
    NewRequestData,
    Parts,
    RecurrentStateSpec,
    SamplingParams,
    SchedulerOutput,
)
from penstock.contract.runner_output import SampledOutput
from penstock.executor.recording.entries import Start

_NULL_BLOCK = 0
# Id of the request that computes KV; no request of an engine has it.
_FILLING = "replay: earlier positions"
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, seed=0)


def num_scratch_blocks(config: KVCacheConfig, positions_per_block: int, max_model_len: int) -> list[int]:
    """Blocks of each pool that a replay needs besides the recorded ones, for positions that no window reaches any more.

    positions_per_block: factor of the block size, the size of decode context parallelism.
    """
    counts = [0] * len(config.pools)
    for group in config.groups:
        if not group.spec.num_own_blocks:
            counts[group.pool] += _num_blocks(group.spec.block_size * positions_per_block, max_model_len)
    return counts


class ReplayedSteps:
    """Converts recorded steps for workers that begin empty.

    A request that comes with computed positions, from before the recording or of a cached prefix, is computed first,
    into the blocks that it has, by a request that ends before it would sample. On workers whose results do not depend
    on the batch that gives the same KV. Draft tokens that only the device knew are replaced by the accepted ones, and
    the rejected ones by others, so that the steps need no drafter.
    """

    def __init__(
        self,
        start: Start,
        results: Mapping[int, ModelRunnerOutput],
        *,
        max_num_batched_tokens: int,
        positions_per_block: int = 1,
    ) -> None:
        """results: recorded results by step id. positions_per_block: as in `num_scratch_blocks`."""
        self._results = results
        self._budget = max_num_batched_tokens
        self._groups = start.kv_cache_config.groups
        self._positions_per_block = positions_per_block
        self._held_before = {request.req_id: request for request in start.requests}
        self._scratch = self._scratch_blocks(start)
        self._num_steps = 0
        # Ids of the replayed steps that added no request, by recorded id, until another one repeats them.
        self._replayed: dict[int | None, int] = {}
        self.num_filled_tokens = 0

    def fillings(self, step: SchedulerOutput) -> Iterator[SchedulerOutput]:
        """Steps to run before a recorded one, which compute the positions that its new requests have already."""
        requests = [request for request in self._added(step) if request.num_computed_tokens]
        gone = step.finished_req_ids | step.preempted_req_ids
        if requests and gone:
            # The recorded step removes them first: their slots are free for its new requests.
            yield SchedulerOutput(step_id=self._next_id(), finished_req_ids=gone)
        for request in requests:
            yield from self._fill(request)

    def replayed(self, step: SchedulerOutput) -> SchedulerOutput:
        """Convert a recorded step, after its `fillings`."""
        added = {request.req_id: request for request in self._added(step)}
        earlier = [self._held_before.pop(req_id) for req_id in added if req_id in self._held_before]
        cached, drafts = step.scheduled_cached_reqs, self._drafts(step)
        if earlier:
            kept = [index for index, req_id in enumerate(cached.req_ids) if req_id not in added]
            cached = _at(cached, kept)
        step_id = self._next_id()
        repeats = self._replayed.pop(step.repeats_step_id, None)
        if not added:
            self._replayed[step.step_id] = step_id
        return replace(
            step,
            step_id=step_id,
            scheduled_new_reqs=list(added.values()),
            scheduled_cached_reqs=cached,
            scheduled_spec_decode_tokens=drafts,
            repeats_step_id=repeats,
        )

    def _added(self, step: SchedulerOutput) -> list[NewRequestData]:
        """Requests of the step that the workers do not hold."""
        cached = step.scheduled_cached_reqs
        earlier = [
            _with_blocks(self._held_before[req_id], blocks)
            for req_id, blocks in _with_new_blocks(cached)
            if req_id in self._held_before
        ]
        return [_replayed(request) for request in (*step.scheduled_new_reqs, *earlier)]

    def _fill(self, request: NewRequestData) -> Iterator[SchedulerOutput]:
        end = request.num_computed_tokens
        # One token more than is computed, so that no step samples.
        token_ids = [*request.prefill_token_ids, 0][: end + 1]
        filling = NewRequestData(
            req_id=_FILLING,
            prompt_token_ids=token_ids,
            prefill_token_ids=token_ids,
            sampling_params=_SAMPLING,
            block_ids=tuple(self._filled_blocks(request, index) for index in range(len(self._groups))),
            num_computed_tokens=0,
            parts=request.parts,
            pooling_params=request.pooling_params,
        )
        self.num_filled_tokens += end
        for position in range(0, end, self._budget):
            num_tokens = min(self._budget, end - position)
            cached = CachedRequestData(req_ids=[_FILLING], new_block_ids=[None], num_computed_tokens=[position])
            yield SchedulerOutput(
                step_id=self._next_id(),
                scheduled_new_reqs=[] if position else [filling],
                scheduled_cached_reqs=cached if position else CachedRequestData(),
                num_scheduled_tokens={_FILLING: num_tokens},
                total_num_scheduled_tokens=num_tokens,
                parts=_parts_of_filling(request, position, position + num_tokens),
            )
        yield SchedulerOutput(step_id=self._next_id(), finished_req_ids={_FILLING})

    def _filled_blocks(self, request: NewRequestData, group: int) -> list[int]:
        """Blocks of one group: the request's own, and scratch ones before its window, where it may have none."""
        spec, own = self._groups[group].spec, request.block_ids[group]
        if isinstance(spec, CrossAttentionSpec):
            return own
        if isinstance(spec, RecurrentStateSpec):
            # Those of its own states, and the snapshot that it begins from.
            return own[: spec.num_own_blocks + request.num_computed_tokens // spec.block_size]
        block_size = spec.block_size * self._positions_per_block
        end = request.num_computed_tokens
        window_begin = spec.first_read(end) if isinstance(spec, AttentionSpec) else 0
        return [
            scratch if (index + 1) * block_size <= window_begin or own[index] == _NULL_BLOCK else own[index]
            for index, scratch in zip(range(_num_blocks(block_size, end)), self._scratch[group], strict=False)
        ]

    def _scratch_blocks(self, start: Start) -> list[range]:
        ranges, ends = [], [pool.num_blocks for pool in start.kv_cache_config.pools]
        for group in self._groups:
            first = ends[group.pool]
            if not group.spec.num_own_blocks:
                ends[group.pool] += _num_blocks(group.spec.block_size * self._positions_per_block, start.max_model_len)
            ranges.append(range(first, ends[group.pool]))
        return ranges

    def _drafts(self, step: SchedulerOutput) -> dict[str, list[int]]:
        """Draft tokens of a step that give the recorded result."""
        if not step.scheduled_spec_decode_tokens:
            return {}
        result = self._results.get(step.step_id)
        sampled: Mapping[str, Sequence[int]] = {}
        if isinstance(result, SampledOutput):
            sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        return {
            req_id: _drafts_that_give(sampled.get(req_id, ()), len(drafts))
            for req_id, drafts in step.scheduled_spec_decode_tokens.items()
        }

    def _next_id(self) -> int:
        self._num_steps += 1
        return self._num_steps


def _num_blocks(block_size: int, num_positions: int) -> int:
    return math.ceil(num_positions / block_size)


def _drafts_that_give(sampled: Sequence[int], num_drafts: int) -> list[int]:
    """Drafts of which those before the last sampled token are accepted, and the next one is rejected."""
    accepted = list(sampled[:-1])
    last = sampled[-1] if sampled else 0
    return (accepted + [0 if last else 1] * num_drafts)[:num_drafts]


def _with_new_blocks(cached: CachedRequestData) -> Iterator[tuple[str, tuple[list[int], ...] | None]]:
    blocks = cached.new_block_ids or [None] * len(cached.req_ids)
    return zip(cached.req_ids, blocks, strict=True)


def _with_blocks(request: NewRequestData, new_blocks: tuple[list[int], ...] | None) -> NewRequestData:
    if new_blocks is None:
        return request
    pairs = zip(request.block_ids, new_blocks, strict=True)
    return replace(request, block_ids=tuple([*old, *new] for old, new in pairs))


def _replayed(request: NewRequestData) -> NewRequestData:
    """The request with its parts as a replay needs them."""
    if request.parts is None:
        return request
    return replace(request, parts=Parts.of(part.replayed() for part in request.parts.values()))


def _at(cached: CachedRequestData, indices: Sequence[int]) -> CachedRequestData:
    return CachedRequestData(
        req_ids=[cached.req_ids[index] for index in indices],
        new_block_ids=[cached.new_block_ids[index] for index in indices] if cached.new_block_ids else [],
        num_computed_tokens=[cached.num_computed_tokens[index] for index in indices],
    )


def _parts_of_filling(request: NewRequestData, start: int, stop: int) -> Parts | None:
    parts = () if request.parts is None else request.parts.values()
    made = (part.of_replayed_step(_FILLING, start, stop) for part in parts)
    return Parts.of(part for part in made if part is not None) or None
