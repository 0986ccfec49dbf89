"""An engine loop for tests: a scheduler, a fake worker, results that arrive late, and all checks after each move."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from scheduler_fakes import EOS, Block, FakeWorker, cache_config, guess, pooled_vector, undisturbed

from penstock.config import SchedulerConfig
from penstock.contract import KVCacheConfig, ModelRunnerOutput, SamplingParams, SchedulerOutput, decode, encode
from penstock.scheduler.draft_budget import Speculation
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request
from penstock.scheduler.scheduler import Scheduler

# Fields of a request; whatever else is given is a sampling parameter.
FIELDS = [field.name for field in dataclasses.fields(Request) if field.init] + ["output_token_ids"]


def make_request(req_id: str, prompt: list[int], **options: Any) -> Request:
    """A request of an engine whose model ends texts with `EOS`; its fields and sampling parameters as `options`."""
    fields = {name: options.pop(name) for name in FIELDS if name in options}
    return Request(req_id, prompt, SamplingParams(**options), frozenset([EOS]), **fields)


def new_blocks(output: SchedulerOutput, manager: KVCacheManager, config: KVCacheConfig) -> set[Block]:
    """The blocks that a step gave out, without those that requests found."""
    taken: set[Block] = set()
    for groups in output.scheduled_cached_reqs.new_block_ids:
        taken |= blocks_of(config, groups or ())
    for new in output.scheduled_new_reqs:
        not_found = [
            [*ids[: group.num_own_blocks], *ids[group.num_own_blocks + new.num_computed_tokens // group.block_size :]]
            for group, ids in zip(manager.groups, new.block_ids, strict=True)
        ]
        taken |= blocks_of(config, not_found)
    return taken


def blocks_of(config: KVCacheConfig, block_ids: Sequence[Sequence[int]]) -> set[Block]:
    """Pools and ids of blocks that are given by group, but the null blocks."""
    return {(group.pool, one) for group, ids in zip(config.groups, block_ids, strict=False) for one in ids if one}


def check_repetition(steps: list[SchedulerOutput], output: SchedulerOutput) -> None:
    """Check the promises of a step that repeats an earlier one."""
    assert output.repeats_step_id is not None
    before = steps[output.repeats_step_id]
    for between in steps[output.repeats_step_id + 1 :]:
        assert between.num_scheduled_tokens.keys().isdisjoint(output.num_scheduled_tokens)
        assert (between.finished_req_ids | between.preempted_req_ids).isdisjoint(output.num_scheduled_tokens)
    assert output.scheduled_cached_reqs.req_ids == before.scheduled_cached_reqs.req_ids
    assert list(output.num_scheduled_tokens) == list(before.num_scheduled_tokens)
    assert set(output.num_scheduled_tokens.values()) == set(before.num_scheduled_tokens.values()) == {1}
    for step in (before, output):
        assert (step.scheduled_new_reqs, step.scheduled_spec_decode_tokens) == ([], {})
    assert (output.finished_req_ids, output.preempted_req_ids) == (set(), set())


class Driver:
    """`depth` steps may be in flight; 1 is a synchronous engine.

    num_faults, num_broken_off: exceptions that a test made a part of the scheduler raise, and requests that ended so.
    max_drafts: each request is given up to as many drafts per step, at random, which only the worker knows where steps
        run ahead of their results.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig | None = None,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        policy: str = "fcfs",
        depth: int = 1,
        enable_prefix_caching: bool = True,
        async_scheduling: bool | None = None,
        fast_paths: str = "auto",
        max_drafts: int = 0,
        seed: int = 0,
        pools: bool = False,
        num_lookahead_tokens: int = 0,
        num_speculative_tokens: int = 0,
        blocks_need_next_token: bool = False,
        max_concurrent_steps: int = 1,
        features: Sequence[Callable[[Scheduler], SchedulerFeature]] = (),
    ) -> None:
        self.config = kv_cache_config or cache_config(33)
        self.depth = depth
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                policy=policy,
                fast_paths=fast_paths,
            ),
            self.config,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=depth > 1 if async_scheduling is None else async_scheduling,
            speculation=Speculation(
                num_speculative_tokens=num_speculative_tokens,
                num_lookahead_tokens=num_lookahead_tokens,
                blocks_need_next_token=blocks_need_next_token,
            ),
            max_concurrent_steps=max_concurrent_steps,
            tell_ends=self._note,
            features=features,
        )
        self.max_drafts = max_drafts
        self.pools = pools
        self.rng = random.Random(seed)
        self.salts: dict[str, str | None] = {}
        self.requests: dict[str, Request] = {}
        self.worker = self._new_worker()
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        # By step, the blocks that it touches; by what holds them, those that others do.
        self.touched: dict[int, set[Block]] = {}
        self.holds: dict[tuple[str, str], set[Block]] = {}
        self.steps: list[SchedulerOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineCoreOutput] = {}
        self.num_broken_off = 0
        self.num_faults = 0

    def add(self, req_id: str, prompt: list[int], **options: Any) -> Request:
        request = make_request(req_id, prompt, pools=self.pools, **options)
        self.scheduler.add_request(request)
        self.salts[req_id] = request.cache_salt
        self.requests[req_id] = request
        self.tokens[req_id] = request.all_token_ids[request.num_prompt_tokens :]
        self.ends.pop(req_id, None)
        return request

    def abort(self, *req_ids: str) -> None:
        self._note(self.scheduler.finish_requests(req_ids))
        self.scheduler.kv_cache.check_integrity()

    def step(self, failing: tuple[str, ...] = ()) -> SchedulerOutput:
        """Schedule and launch one step; its results stay in flight."""
        if self.max_drafts:
            self.scheduler.update_draft_token_ids(self._drafts())
        # As in another process.
        output = decode(encode(self.scheduler.schedule()), SchedulerOutput)
        assert output.step_id == (self.steps[-1].step_id + 1 if self.steps else 0)
        if output.repeats_step_id is not None:
            check_repetition(self.steps, output)
        self.scheduler.kv_cache.check_integrity()
        self.steps.append(output)
        taken = new_blocks(output, self.scheduler.kv_cache, self.config)
        touched = [self.touched[launched.step_id] for launched, _ in self.in_flight]
        assert taken.isdisjoint(set().union(*touched, *self.holds.values()))
        self.worker.is_exact = not self.in_flight
        results = self.worker.execute(output, failing)
        if output.num_scheduled_tokens:
            self.in_flight.append((output, results))
            self.touched[output.step_id] = self.worker.touched
        return output

    def deliver(self) -> list[EngineCoreOutput]:
        """Hand the oldest results to the scheduler."""
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        self._note(outputs)
        self.scheduler.kv_cache.check_integrity()
        return outputs

    def crash(self) -> None:
        """Lose the worker, and find that its last results still arrive."""
        self.scheduler.reset_for_recovery()
        self.worker = self._new_worker()
        while self.in_flight:
            assert self.deliver() == []

    def hold(self, req_id: str, holder: str) -> None:
        """Hold the blocks of a request that runs."""
        manager = self.scheduler.kv_cache
        manager.hold_blocks(req_id, holder)
        self.holds[req_id, holder] = blocks_of(self.config, manager.get_block_ids(req_id))
        manager.check_integrity()

    def release(self, req_id: str, holder: str) -> None:
        """Let go of them."""
        self.scheduler.kv_cache.release_blocks(req_id, holder)
        del self.holds[req_id, holder]
        self.scheduler.kv_cache.check_integrity()

    def turn(self) -> SchedulerOutput:
        """One turn of an engine loop at this depth."""
        output = self.step()
        is_idle = output.total_num_scheduled_tokens == 0
        if self.in_flight and (is_idle or len(self.in_flight) >= self.depth):
            self.deliver()
        return output

    def drain(self, max_turns: int = 2000) -> None:
        """Run until everything has ended and the worker knows of it; everyone is ready, and holds no blocks."""
        for hold in list(self.holds):
            self.release(*hold)
        for req_id, request in self.requests.items():
            for reason in list(request.waits_for):
                self.scheduler.ready(req_id, reason)
        for _ in range(max_turns):
            if not self.in_flight and not self.scheduler.has_work():
                break
            self.turn()
        else:
            raise AssertionError(f"no end in sight after {max_turns} turns")
        self.check_empty()

    def check_empty(self) -> None:
        scheduler = self.scheduler
        assert not self.worker.requests
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight_steps) == (0, 0, 0)
        assert not scheduler.has_work()
        for pool in scheduler.kv_cache.pools:
            assert (pool.num_used_blocks, pool.num_pending_blocks) == (0, 0)
        assert not scheduler.kv_cache._held
        scheduler.kv_cache.check_integrity()

    def _note(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            assert output.req_id not in self.ends
            assert output.new_token_ids or output.finish_reason
            if output.new_logprobs is not None:
                assert [row[0] for row in output.new_logprobs.logprob_token_ids] == output.new_token_ids
            self.tokens[output.req_id] += output.new_token_ids
            if output.error is not None and "scheduler failed" in output.error:
                self.num_broken_off += 1
                assert self.num_broken_off <= self.num_faults, output.error
            if output.finish_reason is not None:
                self.ends[output.req_id] = output
                self._check_end(output)

    def _check_end(self, output: EngineCoreOutput) -> None:
        """A request that ran to its end got the tokens of an undisturbed run; any other, the beginning of them."""
        request, tokens = self.requests[output.req_id], self.tokens[output.req_id]
        if self.pools:
            is_whole = output.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR)
            expected_vector = pooled_vector(request.prompt_token_ids, request.cache_salt)
            assert (tokens, output.pooled) == ([], expected_vector if is_whole else None)
            return
        expected, reason = undisturbed(
            request.prompt_token_ids, request.sampling_params, request.cache_salt, self.max_model_len
        )
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, output.finish_reason) == (expected, reason)

    def _drafts(self) -> dict[str, list[int]]:
        drafts = {}
        for req_id, request in self.requests.items():
            num_drafts = self.rng.randrange(self.max_drafts + 1)
            is_known = not request.num_output_placeholders and self.rng.random() < 0.7
            known = guess(request.all_token_ids, request.cache_salt, num_drafts, self.rng)
            drafts[req_id] = known if is_known else [-1] * num_drafts
        return drafts

    def _new_worker(self) -> FakeWorker:
        return FakeWorker(
            self.config,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            self.salts,
            self.pools,
            rng=self.rng,
        )
