"""Scheduler: requests, tokens and KV cache blocks of each step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from penstock.config import SchedulerConfig
from penstock.contract import KVCacheConfig, ModelRunnerOutput, Parts, SamplingInput, SchedulerOutput
from penstock.contract.parts import OutputPart
from penstock.errors import InvalidRequest
from penstock.scheduler.acceptance import SpecDecodeMetrics
from penstock.scheduler.admission import Admission
from penstock.scheduler.draft_budget import NO_SPECULATION, Speculation
from penstock.scheduler.feature import Chunks, SchedulerFeature, methods_of
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.measured_costs import ComputeTimes
from penstock.scheduler.outputs import RUNNING, CoreState, EngineCoreOutput, FinishReason, SchedulerStats
from penstock.scheduler.repetition import RepeatedSteps
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.request_limits import LengthLimits
from penstock.scheduler.request_lists import RequestLists
from penstock.scheduler.results import make_output, with_part
from penstock.scheduler.state_pool import StatePool
from penstock.scheduler.step import Step, StepBuilder
from penstock.scheduler.steps_in_flight import StepsInFlight

logger = logging.getLogger(__name__)
_OutputMethod: TypeAlias = Callable[[Sequence[EngineCoreOutput]], Mapping[str, OutputPart]]


class Scheduler:
    """Schedules requests step by step, and keeps their state.

    There is no prefill phase and no decode phase: each request has `num_computed_tokens` and a length to reach, and a
    step gives it some tokens. Counts advance when a step is scheduled; tokens that are sampled but not yet known are
    placeholders. With `async_scheduling` a request goes on beyond its placeholders, since the device knows its own last
    token; without, it waits for them. Draft tokens count as accepted until
    the results arrive, which then reduce the counts by the rejected ones.

    The worker must execute the steps in order, and their results must come back in that order, each exactly once.
    A step without tokens that names finished or preempted requests must reach the worker too.

    kv_cache_config: the KV cache. max_model_len: maximum context length in tokens, prompt and output together.
    max_concurrent_steps: number of steps that workers execute at once, as with pipeline stages. Decoding requests are
        split into as many microbatches, which take turns.
    features: factories of features that add parts to the messages of steps and read parts of results.
    sends_whole_parts: send parts of requests with the data of tokens that are computed too, which a replay needs.
    tell_ends: callback with the last output of a request for which `schedule` fails, while others go on; None raises
        the exception.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        *,
        max_model_len: int,
        enable_prefix_caching: bool,
        async_scheduling: bool,
        speculation: Speculation = NO_SPECULATION,
        max_concurrent_steps: int = 1,
        tell_ends: Callable[[list[EngineCoreOutput]], None] | None = None,
        features: Sequence[Callable[[Scheduler], SchedulerFeature]] = (),
        sends_whole_parts: bool = False,
    ) -> None:
        self._sends_whole_parts = sends_whole_parts
        # State in which features let the core rest, by feature; and that of the core, `RUNNING` if none does.
        self._rests: dict[object, CoreState] = {}
        self.rest = RUNNING
        self._tell_ends = tell_ends
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._runs_ahead = async_scheduling
        self._max_concurrent_steps = max_concurrent_steps
        self._last_turns: deque[Step] = deque(maxlen=max_concurrent_steps - 1)
        self._draft_budget = speculation.make_budget(measures_time=not async_scheduling)
        self._num_speculative_tokens = speculation.num_speculative_tokens
        # Whether requests verify draft tokens that only the device knows.
        self._has_placeholders = async_scheduling and speculation.num_speculative_tokens > 0
        self.kv_cache = KVCacheManager(
            kv_cache_config,
            enable_prefix_caching=enable_prefix_caching,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_lookahead_tokens=speculation.num_lookahead_tokens,
            blocks_need_next_token=speculation.blocks_need_next_token,
        )
        longest_chunk = None if config.enable_chunked_prefill else config.max_num_batched_tokens
        self._limits = LengthLimits(max_model_len, longest_chunk, self.kv_cache)
        self._requests = RequestLists(config.policy, self.kv_cache, self._note_ending, self._note_end)
        self._in_flight = StepsInFlight(self._requests, self.kv_cache, self._draft_budget)
        self._next_step_id = 0
        self._num_computed_tokens = 0
        self._compute_times: ComputeTimes | None = None
        self.features = [make_feature(self) for make_feature in features]
        # Methods of features that every step calls, of those that have them.
        self._part_methods = methods_of(self.features, "part_of_step")
        self._result_methods = methods_of(self.features, "take_results")
        self._output_methods = methods_of(self.features, "parts_of_outputs")
        # Those of them that are called for results without parts, too.
        self._own_output_methods: list[_OutputMethod] = []
        self._ending_methods = methods_of(self.features, "request_ending")
        self._end_methods = methods_of(self.features, "request_ended")
        self._sampling_methods = methods_of(self.features, "sampling_part")
        self._chunks = Chunks(self.features)
        self._admission = Admission(
            config, self._requests, self._in_flight, self.kv_cache, self.features, self._chunks, self._break_off
        )
        self._repetition = RepeatedSteps(
            config,
            self._requests,
            self._in_flight,
            self.kv_cache,
            self._draft_budget,
            self._break_off,
            runs_ahead=async_scheduling,
            num_microbatches=max_concurrent_steps,
        )

    @property
    def num_running(self) -> int:
        return len(self._requests.running)

    @property
    def num_waiting(self) -> int:
        """Waiting requests, new or preempted."""
        return len(self._requests.waiting)

    @property
    def stats(self) -> SchedulerStats:
        """Counts of requests and blocks, between two steps."""
        states = [pool for pool in self.kv_cache.pools if isinstance(pool, StatePool)]
        blocks = [pool for pool in self.kv_cache.pools if not isinstance(pool, StatePool)]
        of_features = {name: count for feature in self.features for name, count in feature.counts().items()}
        return SchedulerStats(
            num_running_reqs=self.num_running,
            num_waiting_reqs=self.num_waiting,
            num_blocks=sum(pool.num_blocks - 1 for pool in blocks),
            num_used_blocks=sum(pool.num_used_blocks for pool in blocks),
            num_computed_tokens=self._num_computed_tokens,
            num_cached_blocks=sum(pool.num_cached_blocks for pool in blocks),
            num_states=sum(pool.num_blocks - 1 for pool in states),
            num_used_states=sum(pool.num_used_blocks for pool in states),
            num_snapshots=sum(pool.num_snapshots for pool in states),
            num_snapshots_taken=sum(pool.num_taken for pool in states),
            num_snapshots_evicted=sum(pool.num_evicted for pool in states),
            **of_features,
            counters={name: count for feature in self.features for name, count in feature.counters().items()},
            gauges={name: value for feature in self.features for name, value in feature.gauges().items()},
            state=self.rest,
        )

    def let_rest(self, owner: object, state: CoreState) -> None:
        """Let the core rest: it runs no steps, and replaces no lost workers. `RUNNING` ends that of the same owner."""
        self._rests.pop(owner, None)
        if state != RUNNING:
            self._rests[owner] = state
        self.rest = next(iter(self._rests.values()), RUNNING)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._requests.num_preemptions

    @property
    def num_in_flight_steps(self) -> int:
        """Steps with tokens whose results have not arrived."""
        return len(self._in_flight.steps)

    @property
    def spec_decode_metrics(self) -> SpecDecodeMetrics:
        """Acceptance of all draft tokens so far."""
        return self._in_flight.spec_decode_metrics

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests.by_id)

    def has_work(self) -> bool:
        """Whether a step is due: for unfinished requests, or for ended ones that the worker still holds."""
        return bool(self._requests.by_id or self._requests.finished_req_ids)

    def add_request(self, request: Request) -> None:
        """Add a waiting request.

        Raises InvalidRequest for an id in use, and errors of `LengthLimits.apply`.
        """
        if request.req_id in self._requests.by_id:
            raise InvalidRequest(
                f"There is a request {request.req_id!r} already, and it has not ended. Give each request its own id."
            )
        self._limits.apply(request)
        if self.kv_cache.is_transferring(request.req_id):
            raise InvalidRequest(
                f"Blocks of an earlier request {request.req_id!r} are being transferred. Give this one another id."
            )
        self._requests.add(request)
        try:
            for feature in self.features:
                feature.request_added(request)
        except BaseException:
            self._requests.finish(request)
            raise

    def finish_requests(
        self, req_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[EngineCoreOutput]:
        """End requests; ignores unknown and ended ids. Results of steps in flight are dropped for them."""
        outputs = []
        for req_id in req_ids:
            request = self._requests.by_id.get(req_id)
            if request is not None:
                self._requests.finish(request)
                outputs.append(make_output(request, [], reason))
        return outputs

    def wait_for(self, req_id: str, reason: str) -> None:
        """Skip a waiting request until `ready`; it keeps its place in the queue.

        reason: missing input, such as its grammar, its adapter, or KV in transfer; there may be several reasons. A
            running request goes on, and waits for it after a preemption. Ignores unknown ids.
        """
        self._requests.wait_for(req_id, reason, is_there=False)

    def holds(self, req_id: str) -> bool:
        """Whether there is an unfinished request with this id."""
        return req_id in self._requests.by_id

    def unfinished_requests(self) -> list[Request]:
        """All requests that wait or run."""
        return list(self._requests.by_id.values())

    def waiting_for(self, reason: str) -> list[Request]:
        """Waiting requests with this reason of `wait_for`, or for which a feature skips them."""
        return self._requests.waiting.with_reason(reason)

    def ready(self, req_id: str, reason: str) -> None:
        """Remove a reason of `wait_for`. Ignores unknown ids and reasons."""
        self._requests.wait_for(req_id, reason, is_there=True)

    def reserve_blocks(self, req_id: str, num_tokens: int, reason: str) -> tuple[list[int], ...] | None:
        """Reserve whole blocks of a waiting request for its first `num_tokens` tokens, to load KV into.

        The request waits until `blocks_loaded`. Returns its block ids per group, those of a prefix-cache hit included;
        None if it does not wait, has blocks already, needs all of its prompt computed, or too few blocks are free. The
        writer must hold the blocks too (`KVCacheManager.hold_blocks`), since the request may end at any time.
        """
        request = self._requests.by_id.get(req_id)
        if request is None or request.status is RequestStatus.RUNNING or self._in_flight.holds(request):
            return None
        if self.kv_cache.holds(request) or request.needs_all_of_prompt:
            return None
        if not self._in_flight.reserve(request, num_tokens):
            return None
        self._requests.wait_for(req_id, reason, is_there=False)
        return self.kv_cache.get_block_ids(req_id)

    def blocks_loaded(self, req_id: str, num_tokens: int, reason: str) -> None:
        """Note the tokens whose KV was loaded into reserved blocks; 0 after a failure, to compute all.

        Has no effect on blocks that were freed meanwhile. Ignores unknown ids.
        """
        request = self._requests.by_id.get(req_id)
        if request is None:
            return
        if request.status is not RequestStatus.RUNNING and self.kv_cache.holds(request):
            self._in_flight.note_loaded(request, num_tokens)
        self._requests.wait_for(req_id, reason, is_there=True)

    def name_ended(self, req_id: str) -> None:
        """Let the next step name a request that ends to the workers, though they may not hold it."""
        self._requests.finished_req_ids.add(req_id)

    def loads_failed(self, num_loaded: Mapping[Request, int]) -> None:
        """Restart requests that were admitted to the oldest step in flight with tokens whose KV its workers loaded.

        num_loaded: tokens of each whose KV is right. Requests that read other blocks of theirs restart, too. Called
        before the step's results are taken in.
        """
        self._in_flight.void_loads(num_loaded)

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Set draft tokens for the next step of requests, after their last tokens, known or in flight.

        -1 stands for a token that only the device knows. Drops draft tokens of requests that do not run, and those
        beyond the draft budget.
        """
        for req_id, token_ids in drafts.items():
            request = self._requests.by_id.get(req_id)
            if request is not None and request.status is RequestStatus.RUNNING and not request.pools:
                most = self._draft_budget.num_for(request) if self._num_speculative_tokens else None
                request.spec_token_ids = list(token_ids[:most])
                if request.spec_token_ids:
                    self._repetition.end()
                    self._draft_budget.note_drafts()

    def schedule(self) -> SchedulerOutput:
        """Build the next step. It may have no tokens, when all requests wait for results or for blocks."""
        step_id = self._next_step_id
        self._next_step_id += 1
        step = self._repetition.next_step(step_id) or self._new_step(step_id)
        if self._part_methods:
            step = self._with_parts(step)
        step = self._repetition.note(step)
        if step.requests:
            self._in_flight.launch(step)
            self._last_turns.append(step)
            if self._compute_times is not None:
                self._compute_times.launch(step_id)
        return step.message

    def sampling_input(self, message: SchedulerOutput) -> SamplingInput:
        """Message for the sampling of a launched step, with the features' parts for its `awaiting_req_ids`.

        message: with the draft tokens of these requests; results of earlier steps with them are taken in.
        """
        parts = Parts.of(part for method in self._sampling_methods if (part := method(message)) is not None)
        return SamplingInput(step_id=message.step_id, parts=parts or None)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in a step's results; return one output per request with new tokens or an end, in batch order.

        Ignores results of steps before `reset_for_recovery`. Raises LifecycleError for results of another step, of an
        unknown request, or out of order.
        """
        if self._compute_times is not None:
            self._compute_times.done(scheduler_output)
        has_parts = model_runner_output.parts is not None
        if has_parts:
            for take_results in self._result_methods:
                take_results(scheduler_output, model_runner_output)
        self._num_computed_tokens += scheduler_output.total_num_scheduled_tokens
        outputs = self._in_flight.settle(scheduler_output, model_runner_output)
        for parts_of_outputs in self._output_methods if has_parts else self._own_output_methods:
            parts = parts_of_outputs(outputs)
            outputs = [with_part(output, parts.get(output.req_id)) for output in outputs] if parts else outputs
        return outputs

    def note_time(self, scheduler_output: SchedulerOutput, seconds: float) -> None:
        """Note the time of a step from `schedule` to its results, for the draft budget; without concurrent steps."""
        num_drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        num_reqs = len(scheduler_output.num_scheduled_tokens)
        if num_reqs and scheduler_output.total_num_scheduled_tokens == num_reqs + num_drafts:
            speculates = num_drafts > 0 or scheduler_output.num_drafts_wanted > 0
            self._draft_budget.note_time(num_reqs, num_drafts, seconds, speculates=speculates)

    def reset_for_recovery(self) -> None:
        """Reset for a new worker: preempt all requests, which keep their order and known tokens.

        Tokens in flight are lost and will be sampled again.
        """
        self._last_turns.clear()
        if self._compute_times is not None:
            self._compute_times.start_over()
        self._requests.finished_req_ids = set()
        self._in_flight.rewind_all(self._next_step_id)
        self.kv_cache.start_over()
        for feature in self.features:
            feature.workers_replaced()

    def preempt_all(self) -> None:
        """Preempt all running requests; the next step names them to the worker."""
        for request in reversed(self._requests.running.copy()):
            self._in_flight.rewind_between_steps(request)
        self._in_flight.rewind_waiting()

    def change_parts(self, change: Callable[[Parts], Parts | None]) -> None:
        """Change the parts of unfinished requests between two steps; None keeps them.

        Changed requests are preempted, and find only cached prefixes of their new parts.
        """
        for request in self.unfinished_requests():
            parts = None if request.parts is None else change(request.parts)
            if parts is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self._in_flight.rewind_between_steps(request)
            elif self.kv_cache.holds(request):
                self._in_flight.note_loaded(request, 0)
            request.parts = parts
            request.block_hashes.clear()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Evict all cached prefixes; False, and nothing is done, while requests hold blocks.

        reset_running_requests: preempt the running requests first, which frees their blocks. reset_connector: let
        features forget what they keep outside of the KV cache; False if one does not.
        """
        if reset_running_requests:
            self.preempt_all()
        for feature in self.features:
            feature.before_reset()
        is_reset = self.kv_cache.reset_prefix_cache()
        if not is_reset:
            logger.warning("The prefix cache was not reset, since requests hold blocks")
        if reset_connector:
            are_reset = [feature.reset_connector() for feature in self.features]
            is_reset = is_reset and all(are_reset)
        return is_reset

    def call_for_all_outputs(self, parts_of_outputs: _OutputMethod) -> None:
        """Call a feature's method for results without parts too from now on; idempotent."""
        if parts_of_outputs not in self._own_output_methods:
            self._own_output_methods.append(parts_of_outputs)

    def measure_computing(self) -> ComputeTimes:
        """Learn from all steps from now on what computing a prompt takes; idempotent."""
        self._compute_times = self._compute_times or ComputeTimes()
        return self._compute_times

    def next_waiting(self, most: int) -> list[Request]:
        """The next waiting requests that nothing keeps waiting but those before them."""
        return self._requests.waiting.first(most)

    def begin_weights(self, weights: str) -> None:
        """Preempt the running requests, and clear the prefix cache; no KV of other weights is found, though it is held.

        weights: name of the weights with which all further KV is computed.
        """
        self.preempt_all()
        for request in self.unfinished_requests():
            request.block_hashes.clear()
        self.kv_cache.begin_weights(weights)
        self.reset_prefix_cache()

    def _new_step(self, step_id: int) -> Step:
        """Build a step request by request."""
        builder = StepBuilder(
            step_id,
            self._max_num_batched_tokens,
            self._share_of_requests(),
            sends_whole_parts=self._sends_whole_parts,
        )
        turns = list(self._last_turns)
        self._schedule_running(builder, turns)
        # A new request would take blocks that preempted and running requests need.
        if not builder.preempted_req_ids and not builder.waits_for_blocks:
            self._admission.admit_to(builder)
        while turns and builder.can_take_others:
            # Fewer requests than microbatches: those that waited longest run again.
            turns.pop(0)
            self._schedule_running(builder, turns)
        num_drafts_wanted = 0
        if self._num_speculative_tokens:
            num_drafts_wanted = self._draft_budget.plan(step_id, self._requests.running)
        finished_req_ids, self._requests.finished_req_ids = self._requests.finished_req_ids, set()
        step = builder.build(finished_req_ids, num_drafts_wanted, clears_blocks=self._in_flight.had_nan)
        if self._has_placeholders and num_drafts_wanted:
            self._expect_drafts(step)
        return step

    def _note_ending(self, request: Request) -> None:
        for request_ending in self._ending_methods:
            request_ending(request)

    def _note_end(self, request: Request) -> None:
        for request_ended in self._end_methods:
            request_ended(request)

    def _with_parts(self, step: Step) -> Step:
        """Add the features' parts to the message of a step."""
        parts = Parts.of(part for method in self._part_methods if (part := method(step.message)) is not None)
        return replace(step, message=replace(step.message, parts=parts)) if parts else step

    def _share_of_requests(self) -> int:
        """Return the maximum number of requests of a step, so that each concurrent step gets some."""
        if self._max_concurrent_steps == 1:
            return self._max_num_seqs
        num_reqs = min(len(self._requests.by_id), self._max_num_seqs)
        return max(1, -(-num_reqs // self._max_concurrent_steps))

    def _schedule_running(self, step: StepBuilder, turns: Iterable[Step]) -> None:
        """Schedule running requests, except those that sampled in one of the `turns`."""
        had_turns = {
            request
            for turn in turns
            for request, max_new_tokens in zip(turn.requests, turn.max_new_tokens, strict=True)
            if max_new_tokens
        }
        runs_ahead, most, scheduled = self._runs_ahead, step.max_num_reqs, step.requests
        are_limited = self._chunks.are_limited
        # Preemption shortens the list from its end, which is safe in this loop.
        for request in self._requests.running:
            if len(scheduled) >= most:
                return
            num_tokens = len(request.all_token_ids)
            if request.num_output_placeholders:
                num_tokens += request.num_output_placeholders
                if not runs_ahead or num_tokens >= request.length_limit:
                    continue
            if had_turns and request in had_turns:
                continue
            drafts = request.spec_token_ids
            if drafts:
                # The step samples one more token than there are drafts.
                num_tokens += min(len(drafts), request.length_limit - 1 - num_tokens)
            num_tokens -= request.num_computed_tokens
            if num_tokens > step.token_budget:
                num_tokens = step.token_budget
            try:
                if are_limited and request.num_computed_tokens < request.num_prompt_tokens:
                    num_tokens = self._chunks.length(request, request.num_computed_tokens, num_tokens)
                if num_tokens <= 0:
                    continue
                new_block_ids: tuple[list[int], ...] | None = None
                if request.num_computed_tokens + num_tokens > request.kv_capacity:
                    new_block_ids = (
                        None if step.waits_for_blocks else self._allocate_or_preempt(request, num_tokens, step)
                    )
                    if new_block_ids is None:
                        step.waits_for_blocks = True
                        continue
                # Blocks of decodes are cached after the step only.
                is_decode = drafts or num_tokens == 1
                shared = () if is_decode else self.kv_cache.share_next(request, request.num_computed_tokens, num_tokens)
                step.add_cached(request, num_tokens, new_block_ids, shared)
                if drafts:
                    # Draft tokens beyond the budget are invalid after another token.
                    request.spec_token_ids = []
            except Exception as error:
                self._break_off(request, error)

    def _break_off(self, request: Request, error: Exception) -> None:
        """End a request after an exception; the loop over running requests skips the next one."""
        if self._tell_ends is None:
            raise error
        self._tell_ends([self._requests.break_off(request, error)])

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, step: StepBuilder
    ) -> tuple[list[int], ...] | None:
        """Allocate blocks for the request, preempting later ones if necessary.

        None if it must wait until steps in flight free blocks, or was preempted itself.
        """
        while (new_block_ids := self.kv_cache.allocate_slots(request, num_tokens)) is None:
            if self.kv_cache.will_have_room_for(request, num_tokens):
                return None
            victim = self._requests.running[-1]
            # Rejected draft tokens in flight may reduce its need.
            if victim is request and self._in_flight.holds(request):
                return None
            self._in_flight.rewind(victim)
            step.preempted_req_ids.add(victim.req_id)
            if victim is request:
                return None
        return new_block_ids

    def _expect_drafts(self, step: Step) -> None:
        """Set placeholders for the draft tokens that the device makes after this step."""
        for request, max_new_tokens in zip(step.requests, step.max_new_tokens, strict=True):
            if max_new_tokens > 0:
                request.spec_token_ids = [-1] * self._draft_budget.num_for(request)
                self._draft_budget.note_drafts()
