"""The steps whose results have not arrived, and what these do to requests when they do."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from penstock.contract import ModelRunnerOutput, PooledOutput, SampledOutput, SchedulerOutput
from penstock.errors import LifecycleError
from penstock.scheduler.acceptance import SpecDecodeMetrics
from penstock.scheduler.decode_steps import DecodeStep
from penstock.scheduler.draft_budget import DraftBudget
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.request_lists import RequestLists
from penstock.scheduler.results import (
    logprobs_of_rows,
    make_output,
    take_prompt_logprobs,
    take_tokens,
)
from penstock.scheduler.step import ScheduledRequest, void_what_read_lost_blocks

# Looked up for every request of a step.
_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED
# Requests that an error names of a step.
_NUM_NAMED = 5


class StepsInFlight:
    """Steps with tokens that were launched, oldest first. Results come in their order, each once.

    steps: by step id, what each runs. spec_decode_metrics: what became of all drafts so far.
    had_nan: whether blocks may hold NaN, since some request's logits were not finite.
    """

    def __init__(self, requests: RequestLists, kv_cache: KVCacheManager, draft_budget: DraftBudget) -> None:
        self.steps: dict[int, dict[str, ScheduledRequest] | DecodeStep] = {}
        self._requests = requests
        self._kv_cache = kv_cache
        self._draft_budget = draft_budget
        self.spec_decode_metrics = SpecDecodeMetrics()
        self._first_valid_step_id = 0
        self.had_nan = False

    def drop(self, next_step_id: int) -> None:
        """Expect no results of steps before this one any more, and ignore those that come."""
        self.steps.clear()
        self._first_valid_step_id = next_step_id
        self.had_nan = False

    def take(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in a step's results; one output per request that got tokens or ended, in batch order.

        Results of steps that were dropped are ignored. Raises LifecycleError when the results are not of this step,
        name a request that it did not hold, or are not those that are due next.
        """
        scheduled = self._take_due(scheduler_output, model_runner_output)
        if scheduled is None:
            return []
        if isinstance(scheduled, DecodeStep):
            if isinstance(model_runner_output, SampledOutput) and scheduled.has_plain_results(model_runner_output):
                return self._take_tokens(scheduled, model_runner_output)
            scheduled = scheduled.by_request()
        self.had_nan |= bool(model_runner_output.not_finite_req_ids)
        if model_runner_output.errors or len(model_runner_output.req_ids) < len(scheduled):
            self._take_back_lost_blocks(scheduled, model_runner_output)
        outputs = []
        num_rows, row_lengths = 0, _row_lengths(model_runner_output)
        for row, req_id in enumerate(model_runner_output.req_ids):
            entry = scheduled.pop(req_id, None)
            if entry is None:
                raise LifecycleError(f"Step {scheduler_output.step_id} did not hold the request {req_id!r}.")
            try:
                output = self._take_result(entry, model_runner_output, row, num_rows)
            except Exception as error:
                output = self._requests.break_off(entry.request, error)
            if output is not None:
                outputs.append(output)
            if row_lengths:
                num_rows += row_lengths[row]
        return outputs + self._take_left_out(scheduled, model_runner_output)

    def _take_due(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[str, ScheduledRequest] | DecodeStep | None:
        """The requests of a step whose results are due; None when there is nothing to take in."""
        step_id = scheduler_output.step_id
        if model_runner_output.step_id != step_id:
            other = _named(model_runner_output.step_id, model_runner_output.req_ids)
            raise LifecycleError(
                f"The results of {other} were handed in as those of "
                f"{_named(step_id, scheduler_output.num_scheduled_tokens)}."
            )
        if step_id < self._first_valid_step_id or not scheduler_output.num_scheduled_tokens:
            return None
        due = next(iter(self.steps), None)
        if step_id != due:
            expected = "no results are due" if due is None else f"those of {_named(due, self._req_ids(due))} are due"
            raise LifecycleError(
                f"The results of {_named(step_id, scheduler_output.num_scheduled_tokens)} came out of turn: "
                f"{expected}. Results must come in the order of their steps, each once."
            )
        self._kv_cache.pool.note_done(step_id)
        return self.steps.pop(step_id)

    def _req_ids(self, step_id: int) -> Collection[str]:
        step = self.steps[step_id]
        return step.req_ids if isinstance(step, DecodeStep) else step

    def _take_tokens(self, step: DecodeStep, results: SampledOutput) -> list[EngineCoreOutput]:
        """Take in a step of which every request got a token: at once where it is a token and nothing else."""
        outputs = []
        num_computed_tokens = step.num_computed_tokens
        for row, (request, new_token_ids) in enumerate(zip(step.requests, results.sampled_token_ids, strict=True)):
            try:
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
                        self._kv_cache.cache_blocks(request, num_computed_tokens[row] + 1)
                    outputs.append(EngineCoreOutput(req_id=request.req_id, new_token_ids=new_token_ids))
                elif (output := self._take_result(step.part(row), results, row, row)) is not None:
                    outputs.append(output)
            except Exception as error:
                outputs.append(self._requests.break_off(request, error))
        return outputs

    def _take_back_lost_blocks(self, scheduled: dict[str, ScheduledRequest], results: ModelRunnerOutput) -> None:
        """Requests of a step failed, so others may have found blocks that nobody filled: those begin anew."""
        served = set(results.req_ids).difference(results.errors)
        failed = {entry.request for req_id, entry in scheduled.items() if req_id not in served}
        later = {
            step_id: step.by_request() if isinstance(step, DecodeStep) else step for step_id, step in self.steps.items()
        }
        lost_blocks, misled = void_what_read_lost_blocks(failed, [scheduled, *later.values()])
        if misled:
            self.steps = {**later}
        self._kv_cache.forget_content(lost_blocks)
        for request in [request for request in self._requests.running if request in misled]:
            self._requests.preempt_between_steps(request)

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
                self._kv_cache.forget(request)
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
        if max_new_tokens > 1:
            self._draft_budget.note_results(request, max_new_tokens - 1, num_new_tokens - 1)
            self.spec_decode_metrics.note(max_new_tokens - 1, num_new_tokens - 1)
        # A preempted request begins anew.
        if num_new_tokens < max_new_tokens and request.status is _RUNNING:
            request.num_computed_tokens -= max_new_tokens - num_new_tokens
        new_token_ids, finish_reason, stop_reason = take_tokens(request, new_token_ids)
        num_known_tokens = len(request.all_token_ids)
        # All but the last are computed, whether or not steps in flight have computed more.
        if num_known_tokens > request.next_cache_at:
            self._share_computed(request, num_known_tokens - 1)
        if finish_reason is not None:
            self._requests.finish(request)
        elif results.logprobs is None and not request.has_news:
            return EngineCoreOutput(
                req_id=request.req_id, new_token_ids=new_token_ids, num_draft_tokens=max_new_tokens - 1
            )
        rows = slice(num_rows_before, num_rows_before + len(new_token_ids))
        return make_output(
            request,
            new_token_ids,
            finish_reason,
            stop_reason,
            logprobs_of_rows(request, results.logprobs, rows),
            num_draft_tokens=max_new_tokens - 1,
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
        self._requests.finish(request)
        return make_output(request, [], FinishReason.STOP, pooled=pooled)

    def _share_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find the full blocks among known tokens that are computed; a preempted request holds none."""
        if num_computed_tokens >= request.next_cache_at and request.status is _RUNNING:
            self._kv_cache.cache_blocks(request, num_computed_tokens)

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
        self._requests.finish(request)
        return make_output(request, [], FinishReason.ERROR, error=error)


def _row_lengths(results: ModelRunnerOutput) -> list[int]:
    """Rows of log-probabilities of each request of a step; empty where there are none."""
    if not isinstance(results, SampledOutput) or results.logprobs is None:
        return []
    return [len(token_ids) for token_ids in results.sampled_token_ids]


def _named(step_id: int, req_ids: Collection[str]) -> str:
    """A step with its requests, of which there may be many."""
    first = ", ".join(islice(req_ids, _NUM_NAMED))
    more = f" and {len(req_ids) - _NUM_NAMED} more" if len(req_ids) > _NUM_NAMED else ""
    return f"step {step_id} (requests {first}{more})" if first else f"step {step_id} (no requests)"


def _drop(entry: ScheduledRequest) -> None:
    """Let a request go on as if it had never been launched in this step."""
    entry.request.num_in_flight_steps -= 1
    entry.request.num_output_placeholders -= entry.max_new_tokens
