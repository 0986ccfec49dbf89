"""What runs next: one budget of tokens per step, blocks for each request, and a place for every result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.config import SchedulerConfig
from penstock.contract import KVCacheConfig, ModelRunnerOutput, PooledOutput, SampledOutput, SchedulerOutput
from penstock.errors import InvalidRequest, LifecycleError
from penstock.scheduler.block_pool import KVCacheBlock
from penstock.scheduler.decode_steps import DecodeStep, DecodeSteps
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.queues import WaitingQueue
from penstock.scheduler.request import Request, RequestStatus, no_logprobs
from penstock.scheduler.request_limits import check_fits, check_prompt, check_unfinished
from penstock.scheduler.results import (
    logprobs_of_rows,
    make_output,
    take_prompt_logprobs,
    take_tokens,
)
from penstock.scheduler.step import ScheduledRequest, StepBuilder, void_what_read_lost_blocks

# Looked up for every request of a step.
_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


class Scheduler:
    """Decides step by step which requests run, and keeps their state.

    There is no prefill phase and no decode phase: each request has `num_computed_tokens` and wants to reach its
    length, and a step gives it some tokens. A request is ahead of its results as soon as it is scheduled; tokens that
    are sampled but not yet known count as placeholders. With `async_scheduling` a request goes on beyond its
    placeholders, since the device knows its own last token; without, or where the host must see them first, it waits
    for them. Drafts are counted as if all were accepted, and a request is taken back by those that were not when the
    results arrive.

    The worker must execute the steps in order, and their results must come back in that order, each exactly once.
    A step without tokens that names finished or preempted requests must reach the worker too.

    kv_cache_config: the blocks to give out. max_model_len: longest context in tokens, prompt and output together.
    num_lookahead_tokens: tokens beyond those of a step that a speculator may write to the cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        *,
        max_model_len: int,
        enable_prefix_caching: bool,
        async_scheduling: bool,
        num_lookahead_tokens: int = 0,
    ) -> None:
        self.max_model_len = max_model_len
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._runs_ahead = async_scheduling
        self._repeats_steps = config.fast_paths != "off"
        self.kv_cache = KVCacheManager(
            kv_cache_config,
            enable_prefix_caching=enable_prefix_caching,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
        )
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(config.policy)
        # Served in this order, preempted from its end.
        self._running: list[Request] = []
        # Requests that the worker holds although they ended.
        self._finished_req_ids: set[str] = set()
        self._in_flight: dict[int, dict[str, ScheduledRequest] | DecodeStep] = {}
        # Goes on from the last step; None unless all that the next one can do is to decode the same requests.
        self._decodes: DecodeSteps | None = None
        self._last_draft_step_id = -1
        self._next_step_id = 0
        self._first_valid_step_id = 0
        self._num_added = 0
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def num_in_flight_steps(self) -> int:
        """Steps with tokens whose results have not arrived."""
        return len(self._in_flight)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def has_work(self) -> bool:
        """Whether there is a reason to go on: requests to serve, or to clear away in the worker."""
        return bool(self._requests or self._finished_req_ids)

    def add_request(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises InvalidRequest when its id is in use, its prompt is empty, or it has all its tokens; ContextTooLong when
        it can never fit: its prompt leaves no room for an output token, or its full length needs more blocks than there
        are.
        """
        if request.req_id in self._requests:
            raise InvalidRequest(
                f"There is a request {request.req_id!r} already, and it has not ended. Give each request its own id."
            )
        check_prompt(request, self.max_model_len)
        max_tokens = 0 if request.pools else request.sampling_params.max_tokens
        length = self.max_model_len if max_tokens is None else request.num_prompt_tokens + max_tokens
        request.length_limit = min(length, self.max_model_len)
        check_unfinished(request)
        check_fits(request, self.kv_cache, max_model_len=self.max_model_len)
        request.order = self._num_added
        self._num_added += 1
        self._requests[request.req_id] = request
        self._waiting.add(request)
        self._decodes = None

    def finish_requests(
        self, req_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[EngineCoreOutput]:
        """End requests wherever they are; ids that are unknown, or ended before, are passed over.

        What steps in flight still bring for them is dropped.
        """
        outputs = []
        for req_id in req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                self._finish(request)
                outputs.append(make_output(request, [], reason))
        return outputs

    def wait_for(self, req_id: str, reason: str) -> None:
        """Pass over a waiting request until `ready`: others go on meanwhile, and it keeps its place among them.

        reason: what is not there yet, such as its grammar, its adapter, or keys and values on their way; there may be
            several. It does not stop a request that runs, but counts when that waits again. Unknown ids are ignored.
        """
        self._change_reasons(req_id, set.add, reason)

    def ready(self, req_id: str, reason: str) -> None:
        """What a request waited for is there. Unknown ids and reasons are ignored."""
        self._change_reasons(req_id, set.discard, reason)

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """What requests are thought to go on with after their last tokens, known or in flight, in their next step.

        -1 stands for a token that only the device knows. Drafts of requests that do not run are dropped.
        """
        for req_id, token_ids in drafts.items():
            request = self._requests.get(req_id)
            if request is not None and request.status is _RUNNING and not request.pools:
                request.spec_token_ids = list(token_ids)
                if token_ids:
                    self._decodes = None

    def schedule(self) -> SchedulerOutput:
        """Put the next step together. It may have no tokens, when all requests wait for results or for blocks."""
        step_id = self._next_step_id
        self._next_step_id += 1
        decodes = self._decodes
        if decodes is not None and decodes.num_left > 0 and (decodes.runs_ahead or not self._in_flight):
            rows = decodes.due.get(decodes.num_steps)
            new_block_ids = None if rows is None else self._allocate_for(decodes, rows)
            if rows is None or new_block_ids is not None:
                output, self._in_flight[step_id] = decodes.next(step_id, new_block_ids)
                self.kv_cache.pool.note_launched(step_id)
                return output
        step = StepBuilder(step_id, self._max_num_batched_tokens)
        self._schedule_running(step)
        # Who is let in now would only be in the way of those who need the blocks.
        if not step.preempted_req_ids and not step.waits_for_blocks:
            self._schedule_waiting(step)
        if step.scheduled:
            self._in_flight[step_id] = step.scheduled
            self.kv_cache.pool.note_launched(step_id)
        if step.has_drafts:
            self._last_draft_step_id = step_id
        finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        self._decodes = self._continue_decodes(step)
        return step.build(finished_req_ids)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in a step's results; one output per request that got tokens or ended, in batch order.

        Results of steps from before `reset_for_recovery` are ignored. Raises LifecycleError when the results are not
        of this step, name a request that it did not hold, or are not those that are due next.
        """
        scheduled = self._take_in_flight(scheduler_output, model_runner_output)
        if scheduled is None:
            return []
        if isinstance(scheduled, DecodeStep):
            if isinstance(model_runner_output, SampledOutput) and scheduled.has_plain_results(model_runner_output):
                return self._take_tokens(scheduled, model_runner_output)
            scheduled = scheduled.by_request()
        if model_runner_output.errors or len(model_runner_output.req_ids) < len(scheduled):
            self._take_back_lost_blocks(scheduled, model_runner_output)
        outputs = []
        num_rows, row_lengths = 0, _row_lengths(model_runner_output)
        for row, req_id in enumerate(model_runner_output.req_ids):
            entry = scheduled.pop(req_id, None)
            if entry is None:
                raise LifecycleError(f"Step {scheduler_output.step_id} did not hold the request {req_id!r}.")
            output = self._take_result(entry, model_runner_output, row, num_rows)
            if output is not None:
                outputs.append(output)
            if row_lengths:
                num_rows += row_lengths[row]
        return outputs + self._take_left_out(scheduled, model_runner_output)

    def reset_for_recovery(self) -> None:
        """Start over with a worker that holds nothing: the old one died.

        Every running request waits again, in the same order, and keeps its known tokens. Tokens in flight are lost
        and will be sampled again.
        """
        self._in_flight.clear()
        self._decodes = None
        self._first_valid_step_id = self._next_step_id
        self._finished_req_ids = set()
        while self._running:
            self._preempt(self._running.pop())
        for request in self._requests.values():
            request.num_output_placeholders = 0
            request.num_in_flight_steps = 0
        self.kv_cache.start_over()

    def preempt_all(self) -> None:
        """Make every running request wait, holding no blocks; the worker forgets them with the next step."""
        while self._running:
            request = self._running.pop()
            self._preempt(request)
            self._finished_req_ids.add(request.req_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Does nothing and returns False while any request holds blocks."""
        return self.kv_cache.reset_prefix_cache()

    def _change_reasons(self, req_id: str, change: Callable[[set[str], str], None], reason: str) -> None:
        request = self._requests.get(req_id)
        if request is None:
            return
        is_waiting = request.status is not _RUNNING
        if is_waiting:
            self._waiting.remove(request)
        change(request.waits_for, reason)
        if is_waiting:
            self._waiting.add(request)
        self._decodes = None

    def _schedule_running(self, step: StepBuilder) -> None:
        runs_ahead = self._runs_ahead
        # Preemption shortens the list from its end, which a loop over it stands.
        for request in self._running:
            num_tokens = len(request.all_token_ids)
            if request.num_output_placeholders:
                num_tokens += request.num_output_placeholders
                if not runs_ahead or request.needs_tokens_on_host or num_tokens >= request.length_limit:
                    continue
            drafts = request.spec_token_ids
            if drafts:
                # The step samples one more token than there are drafts.
                num_tokens += min(len(drafts), request.length_limit - 1 - num_tokens)
            num_tokens -= request.num_computed_tokens
            if num_tokens > step.token_budget:
                num_tokens = step.token_budget
            if num_tokens <= 0:
                continue
            new_block_ids: tuple[list[int], ...] | None = None
            if request.num_computed_tokens + num_tokens > request.kv_capacity:
                new_block_ids = None if step.waits_for_blocks else self._allocate_or_preempt(request, num_tokens, step)
                if new_block_ids is None:
                    step.waits_for_blocks = True
                    continue
            if drafts:
                step.add_cached(request, num_tokens, new_block_ids)
                # Those that found no room are of no use once there is another token before them.
                request.spec_token_ids = []
            elif num_tokens > 1:
                step.add_cached(request, num_tokens, new_block_ids, self._share_next(request, num_tokens))
            else:
                step.add_cached(request, num_tokens, new_block_ids)

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, step: StepBuilder
    ) -> tuple[list[int], ...] | None:
        """Blocks for the request, if need be from those who come after it.

        None when it must wait until the steps in flight are done with them, or had to give way itself.
        """
        while (new_block_ids := self.kv_cache.allocate_slots(request, num_tokens)) is None:
            if self.kv_cache.will_have_room_for(request, num_tokens):
                return None
            victim = self._running[-1]
            # Drafts in flight that are rejected take it back, so that it may need less.
            if victim is request and request.num_in_flight_steps > 0:
                return None
            self._running.pop()
            self._preempt(victim)
            step.preempted_req_ids.add(victim.req_id)
            if victim is request:
                return None
        return new_block_ids

    def _schedule_waiting(self, step: StepBuilder) -> None:
        while step.token_budget > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting.peek()
            if request is None or not self._admit(request, step):
                return

    def _admit(self, request: Request, step: StepBuilder) -> bool:
        """Give the request whose turn it is its first tokens; False when it must wait, and all others behind it."""
        # After a preemption, tokens may still be on their way: they are a part of what must be computed again.
        if request.num_in_flight_steps > 0:
            return False
        hit = self.kv_cache.get_computed_blocks(request)
        if not self.kv_cache.has_room_for(request, hit):
            return False
        num_tokens = min(request.num_tokens - hit.num_tokens, step.token_budget)
        if self.kv_cache.allocate_slots(request, num_tokens, hit) is None:
            return False
        self._waiting.admit(self._running)
        request.status = RequestStatus.RUNNING
        request.has_news = True
        request.num_computed_tokens = hit.num_tokens
        # A prompt that a preemption cut short begins anew.
        request.prompt_logprobs = no_logprobs() if request.needs_prompt_logits else None
        self._note_first_run(request, hit.num_tokens)
        found = [block for blocks in hit.blocks for block in blocks]
        shared = self._share_next(request, num_tokens)
        step.add_new(request, num_tokens, self.kv_cache.get_block_ids(request.req_id), found, shared)
        return True

    def _continue_decodes(self, step: StepBuilder) -> DecodeSteps | None:
        """How to go on from this step, if the next one can only do the same again."""
        if not self._repeats_steps or self._last_draft_step_id in self._in_flight:
            return None
        num_running = len(self._running)
        runs_all = bool(num_running) and len(step.scheduled) == num_running and step.is_all_decodes
        can_admit = num_running < self._max_num_seqs and self._waiting.peek() is not None
        if not runs_all or can_admit:
            return None
        runs_ahead = self._runs_ahead and not any(request.needs_tokens_on_host for request in self._running)
        return DecodeSteps(self._running.copy(), step.cached_only, runs_ahead=runs_ahead)

    def _allocate_for(self, decodes: DecodeSteps, rows: list[int]) -> dict[int, tuple[list[int], ...]] | None:
        """A block of each group for the requests of these rows; None where somebody would have to give way."""
        if len(rows) * len(self.kv_cache.groups) > self.kv_cache.pool.num_free_blocks:
            return None
        new_block_ids = {row: self.kv_cache.allocate_slots(decodes.requests[row], 1) for row in rows}
        assert all(blocks is not None for blocks in new_block_ids.values())
        return new_block_ids  # type: ignore[return-value]

    def _share_next(self, request: Request, num_tokens: int) -> Sequence[KVCacheBlock]:
        """Let others find what the request's next tokens fill, from the step on that computes them.

        Attention backends promise it of requests of more than one token only.
        """
        if num_tokens == 1:
            return ()
        return self.kv_cache.cache_blocks(request, min(request.num_computed_tokens + num_tokens, request.num_tokens))

    def _note_first_run(self, request: Request, num_cached_tokens: int) -> None:
        if request.num_cached_tokens >= 0:
            return
        request.num_cached_tokens = num_cached_tokens
        request.first_scheduled_time = time.monotonic()

    def _preempt(self, request: Request) -> None:
        """Make a request, which was just taken out of the running ones, wait with nothing but its tokens."""
        self._decodes = None
        self.kv_cache.free(request)
        request.spec_token_ids = []
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)

    def _take_in_flight(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[str, ScheduledRequest] | DecodeStep | None:
        """The requests of a step whose results are due; None when there is nothing to take in."""
        step_id = scheduler_output.step_id
        if model_runner_output.step_id != step_id:
            raise LifecycleError(f"Step {step_id} cannot take the results of step {model_runner_output.step_id}.")
        if step_id < self._first_valid_step_id or not scheduler_output.num_scheduled_tokens:
            return None
        due = next(iter(self._in_flight), None)
        if step_id != due:
            expected = "no results are due" if due is None else f"those of step {due} are due"
            raise LifecycleError(
                f"The results of step {step_id} came out of turn: {expected}. Results must come in the order of their "
                "steps, each once."
            )
        self.kv_cache.pool.note_done(step_id)
        return self._in_flight.pop(step_id)

    def _take_tokens(self, step: DecodeStep, results: SampledOutput) -> list[EngineCoreOutput]:
        """Take in a step of which every request got a token: at once where it is a token and nothing else."""
        outputs = []
        num_computed_tokens = step.num_computed_tokens
        for row, (request, new_token_ids) in enumerate(zip(step.requests, results.sampled_token_ids, strict=True)):
            token_ids = request.all_token_ids
            if (
                len(new_token_ids) == 1
                and request.status is _RUNNING
                and new_token_ids[0] not in request.end_token_ids
                and len(token_ids) + 1 < request.length_limit
                and not request.has_news
            ):
                request.num_in_flight_steps -= 1
                request.num_output_placeholders -= 1
                token_ids.append(new_token_ids[0])
                if num_computed_tokens[row] + 1 >= request.next_cache_at:
                    self.kv_cache.cache_blocks(request, num_computed_tokens[row] + 1)
                outputs.append(EngineCoreOutput(req_id=request.req_id, new_token_ids=new_token_ids))
            elif (output := self._take_result(step.part(row), results, row, row)) is not None:
                outputs.append(output)
        return outputs

    def _take_back_lost_blocks(self, scheduled: dict[str, ScheduledRequest], results: ModelRunnerOutput) -> None:
        """Requests of a step failed, so others may have found blocks that nobody filled: those begin anew."""
        served = set(results.req_ids).difference(results.errors)
        failed = {entry.request for req_id, entry in scheduled.items() if req_id not in served}
        later = {
            step_id: step.by_request() if isinstance(step, DecodeStep) else step
            for step_id, step in self._in_flight.items()
        }
        lost_blocks, misled = void_what_read_lost_blocks(failed, [scheduled, *later.values()])
        if misled:
            self._in_flight = {**later}
        self.kv_cache.forget_content(lost_blocks)
        for request in [request for request in self._running if request in misled]:
            self._running.remove(request)
            self._preempt(request)
            self._finished_req_ids.add(request.req_id)

    def _take_result(
        self, entry: ScheduledRequest, results: ModelRunnerOutput, row: int, num_rows_before: int
    ) -> EngineCoreOutput | None:
        """Take in one request's part of a step, with so many rows of log-probabilities before its own."""
        request = entry.request
        if entry.is_void:
            _drop(entry)
            return None
        request.num_in_flight_steps -= 1
        if request.status is _FINISHED:
            return None
        if results.errors and request.req_id in results.errors:
            if request.req_id in results.not_finite_req_ids:
                self.kv_cache.forget(request)
            return self._fail(request, results.errors[request.req_id])
        if not isinstance(results, SampledOutput):
            return self._take_pooled(entry, results, row)
        new_token_ids, max_new_tokens = results.sampled_token_ids[row], entry.max_new_tokens
        num_new_tokens = len(new_token_ids)
        if num_new_tokens > max_new_tokens or (num_new_tokens == 0 and max_new_tokens):
            due = f"1 to {max_new_tokens}" if max_new_tokens > 1 else str(max_new_tokens)
            return self._fail(
                request, f"The worker sampled {num_new_tokens} tokens in step {results.step_id} instead of {due}."
            )
        if results.prompt_logprobs:
            take_prompt_logprobs(request, results)
        if not new_token_ids:
            if request.pools:
                return self._fail(request, f"The worker pooled nothing in step {results.step_id}, but sampled.")
            self._share_computed(request, entry.num_computed_tokens)
            return None
        request.num_output_placeholders -= max_new_tokens
        # A preempted request begins anew.
        if num_new_tokens < max_new_tokens and request.status is _RUNNING:
            request.num_computed_tokens -= max_new_tokens - num_new_tokens
        new_token_ids, finish_reason, stop_reason = take_tokens(request, new_token_ids)
        num_known_tokens = len(request.all_token_ids)
        # All but the last are computed, whether or not steps in flight have computed more.
        if num_known_tokens > request.next_cache_at:
            self._share_computed(request, num_known_tokens - 1)
        if finish_reason is not None:
            self._finish(request)
        elif results.logprobs is None and not request.has_news:
            return EngineCoreOutput(req_id=request.req_id, new_token_ids=new_token_ids)
        rows = slice(num_rows_before, num_rows_before + len(new_token_ids))
        return make_output(
            request, new_token_ids, finish_reason, stop_reason, logprobs_of_rows(request, results.logprobs, rows)
        )

    def _take_pooled(self, entry: ScheduledRequest, results: PooledOutput, row: int) -> EngineCoreOutput | None:
        """Take in what became of a prompt."""
        request = entry.request
        if not request.pools:
            return self._fail(request, f"The worker sampled nothing in step {results.step_id}, but pooled.")
        pooled = results.pooled[row]
        is_complete = entry.num_computed_tokens == request.num_tokens
        if is_complete is (pooled is None):
            what = "nothing" if pooled is None else "too early"
            return self._fail(request, f"The worker pooled {what} in step {results.step_id}.")
        self._share_computed(request, entry.num_computed_tokens)
        if pooled is None:
            return None
        self._finish(request)
        return make_output(request, [], FinishReason.STOP, pooled=pooled)

    def _share_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find the full blocks among known tokens that are computed; a preempted request holds none."""
        if num_computed_tokens >= request.next_cache_at and request.status is _RUNNING:
            self.kv_cache.cache_blocks(request, num_computed_tokens)

    def _take_left_out(
        self, scheduled: dict[str, ScheduledRequest], results: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """End the requests of a step that its results do not list: an error of theirs, or of the worker's."""
        outputs = []
        for req_id, entry in scheduled.items():
            if entry.is_void:
                _drop(entry)
            elif entry.request.status is not RequestStatus.FINISHED:
                error = results.errors.get(req_id, f"The worker's results of step {results.step_id} leave it out.")
                outputs.append(self._fail(entry.request, error))
        return outputs

    def _fail(self, request: Request, error: str) -> EngineCoreOutput:
        self._finish(request)
        return make_output(request, [], FinishReason.ERROR, error=error)

    def _finish(self, request: Request) -> None:
        self._decodes = None
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self.kv_cache.free(request)
            self._finished_req_ids.add(request.req_id)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.req_id]


def _row_lengths(results: ModelRunnerOutput) -> list[int]:
    """Rows of log-probabilities of each request of a step; empty where there are none."""
    if not isinstance(results, SampledOutput) or results.logprobs is None:
        return []
    return [len(token_ids) for token_ids in results.sampled_token_ids]


def _drop(entry: ScheduledRequest) -> None:
    """Let a request go on as if it had never been launched in this step."""
    entry.request.num_in_flight_steps -= 1
    entry.request.num_output_placeholders -= entry.max_new_tokens
