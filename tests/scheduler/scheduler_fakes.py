"""A worker without a model, that knows for every KV position what must be in it.

What it "computes" for a position is a fingerprint of all tokens up to there. It writes fingerprints into blocks, reads
back every position that attention would read, and fails when one is not the request's own: a block with two owners,
a stale prefix hit, or a position that was never recomputed shows up at once.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.contract import (
    ArrayBytes,
    AttentionSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCachePool,
    LogprobsLists,
    MLAAttentionSpec,
    NewRequestData,
    PooledOutput,
    RecurrentStateSpec,
    SampledOutput,
    SamplingParams,
    SchedulerOutput,
    SlidingWindowSpec,
)
from penstock.scheduler.outputs import FinishReason

VOCAB_SIZE = 11
EOS = 0
# Pool and id of a block.
Block: TypeAlias = tuple[int, int]
# What is in a position that a broken request should have filled, or one that read such positions.
UNFILLED = -1


def full_spec(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")


def window_spec(sliding_window: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=sliding_window
    )


def chunk_spec(chunk_size: int, block_size: int = 4) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", chunk_size=chunk_size)


def latent_spec(block_size: int = 4) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block_size, head_size=12, dtype="float32")


def state_spec(block_size: int = 4, max_drafts: int = 0) -> RecurrentStateSpec:
    return RecurrentStateSpec(state_bytes=64, block_size=block_size, rolls_back=True, max_drafts=max_drafts)


def cache_config(num_blocks: int, *specs: Any) -> KVCacheConfig:
    """A cache with one group per spec, one layer each; with one of full attention if there is none."""
    return cache_of(num_blocks, specs or (full_spec(),))


def cache_of(num_blocks: int, specs: Sequence[Any], num_states: int | None = None, num_pools: int = 1) -> KVCacheConfig:
    """A cache with one group per spec, one layer each.

    num_states: blocks of the pool of recurrent states; `num_blocks` by default. num_pools: of groups of positions.
    """
    kinds = [-1 if isinstance(spec, RecurrentStateSpec) else index % num_pools for index, spec in enumerate(specs)]
    pools = list(dict.fromkeys(kinds))
    groups = tuple(
        KVCacheGroupSpec(layer_names=(f"layer.{index}",), spec=spec, pool=pools.index(kind))
        for index, (spec, kind) in enumerate(zip(specs, kinds, strict=True))
    )
    counts = [num_states if kind < 0 and num_states is not None else num_blocks for kind in pools]
    return KVCacheConfig(pools=tuple(KVCachePool(num_blocks=count) for count in counts), groups=groups)


def fingerprints(token_ids: list[int], salt: str | None) -> list[int]:
    """Per position, a number that names all tokens up to it and the salt."""
    result = []
    value = 1 if salt is None else 2 + sum(map(ord, salt))
    for token_id in token_ids:
        value = hash((value, token_id))
        result.append(value)
    return result


def next_token(fingerprint: int) -> int:
    return (fingerprint >> 7) % VOCAB_SIZE


def pooled_vector(token_ids: list[int], salt: str | None, *, is_misled: bool = False) -> ArrayBytes:
    """Pooled result of a request."""
    return ArrayBytes.of([float(fingerprints(token_ids, salt)[-1] % 1000 + is_misled), 0.5])


def guess(token_ids: list[int], salt: str | None, num_drafts: int, rng: random.Random) -> list[int]:
    """Drafts to follow these tokens, most of them right."""
    drafts: list[int] = []
    for _ in range(num_drafts):
        token_id = next_token(fingerprints(token_ids + drafts, salt)[-1])
        drafts.append(token_id if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE))
    return drafts


def undisturbed(
    prompt: list[int], params: SamplingParams, salt: str | None, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """The tokens of a request that has a worker for itself, and why it ends."""
    token_ids = list(prompt)
    while True:
        token_ids.append(next_token(fingerprints(token_ids, salt)[-1]))
        num_output = len(token_ids) - len(prompt)
        is_eos = token_ids[-1] == EOS and not params.ignore_eos
        if is_eos or token_ids[-1] in params.stop_token_ids:
            return token_ids[len(prompt) :], FinishReason.STOP
        if num_output == params.max_tokens or len(token_ids) == max_model_len:
            return token_ids[len(prompt) :], FinishReason.LENGTH


@dataclass
class FakeRequest:
    token_ids: list[int]
    num_computed_tokens: int
    tables: list[list[int]]
    salt: str | None
    max_num_tokens: int
    wants_logprobs: bool = False
    drafts: list[int] = field(default_factory=list)
    had_drafts: bool = False
    is_broken: bool = False
    is_misled: bool = False


@dataclass
class FakeWorker:
    """Executes steps in order. `salts` tell what the contract does not.

    touched: blocks that the last step read or wrote, by pool and id.
    pools: answers with a pooled vector of each whole prompt.
    is_exact: the results of all steps before have been taken in, so that the scheduler knows what was rejected.
    """

    config: KVCacheConfig
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    salts: Mapping[str, str | None]
    pools: bool = False
    is_exact: bool = True
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    contents: dict[tuple[Block, int], tuple[int, int]] = field(default_factory=dict)
    touched: set[Block] = field(default_factory=set)
    last_step_id: int = -1
    # Of states, in one step.
    _readers: dict[Block, str] = field(default_factory=dict)
    _writers: dict[Block, str] = field(default_factory=dict)

    def execute(self, output: SchedulerOutput, failing: Collection[str] = ()) -> SampledOutput | PooledOutput:
        """Run a step. Requests in `failing` leave their blocks unfilled and end with an error, now and in later steps.

        Who reads what they left unfilled goes on with nonsense.
        """
        assert output.step_id > self.last_step_id
        self.last_step_id = output.step_id
        self._check_shape(output)
        self._apply(output)
        self.touched = set()
        for req_id in output.num_scheduled_tokens:
            self.requests[req_id].is_broken |= req_id in failing
            self._draft(self.requests[req_id], output.scheduled_spec_decode_tokens.get(req_id, []))
        # Shortest first, as a runner sorts its batch, so that batch order is not scheduling order.
        batch = sorted(output.num_scheduled_tokens, key=lambda req_id: (output.num_scheduled_tokens[req_id], req_id))
        healthy = [req_id for req_id in batch if not self.requests[req_id].is_broken]
        # All of a step is written before any of it is read.
        for req_id in batch:
            self._write(self.requests[req_id], output.num_scheduled_tokens[req_id])
        self._mislead(healthy, output.num_scheduled_tokens)
        self._readers.clear()
        self._writers.clear()
        for req_id in healthy:
            if not self.requests[req_id].is_misled:
                self._read(req_id, self.requests[req_id], output.num_scheduled_tokens[req_id])
        errors = {req_id: "broken on purpose" for req_id in batch if req_id not in healthy}
        if self.pools:
            pooled = [
                self._pool(self.requests[req_id], output.num_scheduled_tokens[req_id]) if req_id in healthy else None
                for req_id in batch
            ]
            return PooledOutput(step_id=output.step_id, req_ids=batch, pooled=pooled, errors=errors)
        sampled = [
            self._advance(self.requests[req_id], output.num_scheduled_tokens[req_id]) if req_id in healthy else []
            for req_id in batch
        ]
        logprobs = self._logprobs(batch, sampled)
        return SampledOutput(
            step_id=output.step_id,
            req_ids=batch,
            sampled_token_ids=sampled,
            logprobs=logprobs,
            errors=errors,
        )

    def _logprobs(self, batch: list[str], sampled: list[list[int]]) -> LogprobsLists | None:
        """A row for every token of the step as soon as one of its requests asks for them. Its rank is its number."""
        if not any(self.requests[req_id].wants_logprobs for req_id in batch):
            return None
        token_ids = [token_id for tokens in sampled for token_id in tokens]
        return LogprobsLists(
            logprob_token_ids=[[token_id, 7, 8, 9] for token_id in token_ids],
            logprobs=[[-0.5, -1.0, -2.0, -3.0] for _ in token_ids],
            sampled_token_ranks=list(range(len(token_ids))),
        )

    def _draft(self, request: FakeRequest, drafts: list[int]) -> None:
        """Take the step's drafts, and make those up that the scheduler does not know."""
        made_up = guess(request.token_ids, request.salt, len(drafts), self.rng)
        request.drafts = [own if draft == -1 else draft for own, draft in zip(made_up, drafts, strict=True)]
        request.had_drafts |= bool(drafts)

    def _check_shape(self, output: SchedulerOutput) -> None:
        new = [request.req_id for request in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        assert sorted(new + cached.req_ids) == sorted(output.num_scheduled_tokens)
        assert len(cached.req_ids) == len(cached.num_computed_tokens)
        assert len(cached.new_block_ids) in (0, len(cached.req_ids))
        # Empty if and only if no request got a block.
        assert not cached.new_block_ids or any(block_ids is not None for block_ids in cached.new_block_ids)
        assert all(num_tokens > 0 for num_tokens in output.num_scheduled_tokens.values())
        for req_id, drafts in output.scheduled_spec_decode_tokens.items():
            assert 0 < len(drafts) < output.num_scheduled_tokens[req_id]
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens
        assert output.total_num_scheduled_tokens <= self.max_num_batched_tokens
        assert not (new and output.preempted_req_ids)

    def _apply(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            self.requests.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests
            self.requests[new.req_id] = self._adopt(new)
        assert len(self.requests) <= self.max_num_seqs
        cached = output.scheduled_cached_reqs
        new_block_ids = cached.new_block_ids or [None] * len(cached.req_ids)
        for req_id, block_ids, num_computed in zip(
            cached.req_ids, new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = self.requests[req_id]
            if not request.is_broken:
                assert request.num_computed_tokens <= num_computed
                assert request.num_computed_tokens == num_computed or (request.had_drafts and not self.is_exact)
            for table, new_ids in zip(request.tables, block_ids or [[] for _ in request.tables], strict=True):
                table += new_ids

    def _adopt(self, new: NewRequestData) -> FakeRequest:
        assert new.prefill_token_ids[: len(new.prompt_token_ids)] == new.prompt_token_ids
        assert new.num_computed_tokens < len(new.prefill_token_ids)
        tables = [list(ids) for ids in new.block_ids]
        return FakeRequest(
            list(new.prefill_token_ids),
            new.num_computed_tokens,
            tables,
            self.salts[new.req_id],
            min(
                # A single token is never computed.
                self.max_model_len + (new.sampling_params.max_tokens == 1),
                len(new.prompt_token_ids) + (new.sampling_params.max_tokens or self.max_model_len),
            ),
            wants_logprobs=new.sampling_params.logprobs is not None,
        )

    def _write(self, request: FakeRequest, num_tokens: int) -> None:
        end = request.num_computed_tokens + num_tokens
        is_wrong = request.is_broken or request.is_misled
        token_ids = request.token_ids + request.drafts
        # A broken request no longer moves on.
        assert request.is_broken or end <= len(token_ids) < request.max_num_tokens + self.pools
        assert request.is_broken or not request.drafts or end == len(token_ids)
        values = [UNFILLED] * end if is_wrong else fingerprints(token_ids[:end], request.salt)
        for group_id, size, _ in self._token_groups():
            for position in range(request.num_computed_tokens, end):
                block = self._block(group_id, request.tables[group_id][position // size])
                # A broken request stays where it was, which may be behind its window; the device does steps in order.
                if not request.is_broken:
                    self.touched.add(block)
                self.contents[block, position % size] = (group_id, values[position])

    def _mislead(self, req_ids: list[str], num_tokens: Mapping[str, int]) -> None:
        """Find out who reads what is unfilled, and so writes nonsense for others to read."""
        has_changed = True
        while has_changed:
            has_changed = False
            for req_id in req_ids:
                request = self.requests[req_id]
                if not request.is_misled and self._reads_unfilled(request, num_tokens[req_id]):
                    request.is_misled = has_changed = True
                    self._write(request, num_tokens[req_id])

    def _reads_unfilled(self, request: FakeRequest, num_tokens: int) -> bool:
        for group_id, size, spec in self._token_groups():
            for position in range(spec.first_read(request.num_computed_tokens), request.num_computed_tokens):
                block = self._block(group_id, request.tables[group_id][position // size])
                if self.contents.get((block, position % size), (0, 0))[1] == UNFILLED:
                    return True
        return False

    def _read(self, req_id: str, request: FakeRequest, num_tokens: int) -> None:
        end = request.num_computed_tokens + num_tokens
        values = fingerprints((request.token_ids + request.drafts)[:end], request.salt)
        self._run_states(req_id, request, num_tokens)
        for group_id, size, spec in self._token_groups():
            for position in range(spec.first_read(request.num_computed_tokens), end):
                block = self._block(group_id, request.tables[group_id][position // size])
                self.touched.add(block)
                found = self.contents.get((block, position % size))
                assert found == (group_id, values[position]), f"{req_id}: position {position} of group {group_id}"

    def _block(self, group_id: int, block_id: int) -> Block:
        assert 0 < block_id < self.config.num_blocks_of(group_id)
        return self.config.groups[group_id].pool, block_id

    def _token_groups(self) -> Iterator[tuple[int, int, AttentionSpec]]:
        """Groups whose blocks hold positions of tokens: their number, block size and spec."""
        for group_id, group in enumerate(self.config.groups):
            if not isinstance(group.spec, RecurrentStateSpec):
                yield group_id, group.spec.block_size, group.spec

    def _run_states(self, req_id: str, request: FakeRequest, num_tokens: int) -> None:
        """Read the recurrent state before the step's tokens, and write those after them, and snapshots."""
        begin, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        values = fingerprints((request.token_ids + request.drafts)[:end], request.salt)
        for group_id, group in enumerate(self.config.groups):
            if not isinstance(group.spec, RecurrentStateSpec):
                continue
            size, num_own, table = group.spec.block_size, group.spec.num_own_blocks, request.tables[group_id]
            if begin:
                snapshot = table[num_own + begin // size - 1] if begin % size == 0 else 0
                block = self._block(group_id, snapshot or table[(begin - 1) % num_own])
                self.touched.add(block)
                found = self.contents.get((block, 0))
                assert found == (group_id, values[begin - 1]), f"{req_id}: the state before position {begin}"
                self._readers[block] = req_id
                # Requests of a step run in any order.
                assert self._writers.get(block, req_id) == req_id
            for position in range(begin, end):
                written = [table[position % num_own]] if position >= end - num_own else []
                if (position + 1) % size == 0 and (snapshot := table[num_own + position // size]):
                    written.append(snapshot)
                for block_id in written:
                    block = self._block(group_id, block_id)
                    self.touched.add(block)
                    assert {self._writers.setdefault(block, req_id), self._readers.get(block, req_id)} == {req_id}
                    self.contents[block, 0] = (group_id, values[position])

    def _pool(self, request: FakeRequest, num_tokens: int) -> ArrayBytes | None:
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens < len(request.token_ids):
            return None
        return pooled_vector(request.token_ids, request.salt, is_misled=request.is_misled)

    def _advance(self, request: FakeRequest, num_tokens: int) -> list[int]:
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens < len(request.token_ids):
            return []
        # As on a device, tokens are known here at once, whenever the scheduler learns of them.
        sampled: list[int] = []
        for draft in [*request.drafts, None]:
            token_id = next_token(fingerprints(request.token_ids, request.salt)[-1])
            if request.is_misled:
                token_id = (token_id + 1) % VOCAB_SIZE
            request.token_ids.append(token_id)
            sampled.append(token_id)
            if token_id != draft:
                break
        request.num_computed_tokens -= len(request.drafts) + 1 - len(sampled)
        assert request.num_computed_tokens == len(request.token_ids) - 1
        return sampled
