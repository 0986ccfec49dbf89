"""Steps in flight: launch, results, and preemption of their requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, islice

from penstock.contract import ModelRunnerOutput, PooledOutput, SampledOutput, SchedulerOutput
from penstock.errors import LifecycleError
from penstock.scheduler.acceptance import SpecDecodeMetrics
from penstock.scheduler.block_pool import KVCacheBlock
from penstock.scheduler.draft_budget import DraftBudget
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.request_lists import RequestLists
from penstock.scheduler.results import logprobs_of_rows, make_output, take_prompt_logprobs, tokens_to_end
from penstock.scheduler.step import Step, void_rows_that_read_lost_blocks

# Local names for the hot path.
_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED
# Maximum number of requests named in an error.
_NUM_NAMED = 5
_NOT_FINITE = (
    "{} may have values that are too large: the model's logits for this request's next token have NaN or infinite "
    "values. Other requests go on. Give rows of the size of the model's own."
)


class StepsInFlight:
    """Launched steps with tokens, oldest first; the only place where token counts of requests change.

    `launch` advances the requests of a step as if it were done and all draft tokens accepted; `settle` takes in its
    results, in step order, each once; `rewind` undoes the advance of a preempted request.

    steps: by step id. spec_decode_metrics: acceptance of all draft tokens so far.
    had_nan: whether blocks may hold NaN, since a request had non-finite logits.
    """

    def __init__(self, requests: RequestLists, kv_cache: KVCacheManager, draft_budget: DraftBudget) -> None:
        self.steps: dict[int, Step] = {}
        self._requests = requests
        self._kv_cache = kv_cache
        self._draft_budget = draft_budget
        self.spec_decode_metrics = SpecDecodeMetrics()
        self._first_valid_step_id = 0
        self.had_nan = False

    def holds(self, request: Request) -> bool:
        """Whether a step in flight runs tokens of this request."""
        return any(request in step.requests for step in self.steps.values())

    def launch(self, step: Step) -> None:
        """Advance the requests of a step; its sampled tokens are placeholders until the results."""
        step_id = step.message.step_id
        self.steps[step_id] = step
        self._kv_cache.steps.last_launched = step_id
        for request, num_computed_tokens, max_new_tokens in zip(  # noqa: B905, as in `settle`
            step.requests, step.num_computed_tokens, step.max_new_tokens
        ):
            request.num_computed_tokens = num_computed_tokens
            request.num_output_placeholders += max_new_tokens

    def settle(self, message: SchedulerOutput, results: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in a step's results; return one output per request with new tokens or an end, in batch order.

        Results of dropped steps are ignored. Raises LifecycleError for results of another step, of an unknown request,
        or out of order.
        """
        step = self._take_due(message, results)
        if step is None:
            return []
        if results.errors or len(results.req_ids) < len(step.req_ids):
            self.had_nan |= bool(results.not_finite_req_ids)
            self._void_lost_blocks(step, results)
        if results.req_ids != step.req_ids:
            step = step.reordered(_rows_in_order(step, results.req_ids))
        plain, first_rows = self._plain_outputs(step, results), _first_logprobs_rows(results)
        outputs: list[EngineCoreOutput] = []
        # The keyword `strict` takes as long as ten requests.
        for row, request, output in zip(range(len(plain)), step.requests, plain):  # noqa: B905
            try:
                known_token_ids = request.all_token_ids
                if output is None:
                    output = self._settle_row(step, row, results, first_rows)
                    if output is None:
                        continue
                else:
                    request.num_output_placeholders -= 1
                known_token_ids += output.new_token_ids
                # All known tokens but the last are computed.
                if len(known_token_ids) > request.next_cache_at:
                    self._kv_cache.cache_blocks(request, len(known_token_ids) - 1)
                if output.finish_reason is not None:
                    self._requests.finish(request)
            except Exception as error:
                output = self._requests.break_off(request, error)
            outputs.append(output)
        return outputs

    def _plain_outputs(self, step: Step, results: ModelRunnerOutput) -> Sequence[EngineCoreOutput | None]:
        """Outputs of rows with one token that ends nothing; None for all other rows.

        Repetition vouches for all rows at once.
        """
        if (
            not isinstance(results, SampledOutput)
            or len(results.sampled_token_ids) != len(step.requests)
            or results.logprobs is not None
            or results.prompt_logprobs
            or results.errors
            or step.void_rows
        ):
            return [None] * len(step.requests)
        token_ids = results.sampled_token_ids
        if self._requests.version == step.goes_on_at and _go_on(step, token_ids):
            return list(map(EngineCoreOutput, step.req_ids, token_ids))
        return [
            EngineCoreOutput(request.req_id, new_token_ids)
            if max_new_tokens == 1
            and len(new_token_ids) == 1
            and request.status is _RUNNING
            and new_token_ids[0] not in request.end_token_ids
            and len(request.all_token_ids) + 1 < request.length_limit
            and not request.has_news
            else None
            for request, max_new_tokens, new_token_ids in zip(step.requests, step.max_new_tokens, token_ids)  # noqa: B905
        ]

    def rewind(self, request: Request) -> None:
        """Preempt a running request, which restarts with its known tokens. The step must name it to the worker."""
        self._requests.preempt(request)
        request.num_computed_tokens = 0

    def rewind_between_steps(self, request: Request) -> None:
        """Preempt a running request; the next step names it to the worker."""
        self.rewind(request)
        self._requests.finished_req_ids.add(request.req_id)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for the first tokens of a waiting request, after its prefix-cache hit; False if it fails.

        Requires room for all its tokens, as admission does.
        """
        if not self._kv_cache.can_reserve:
            return False
        hit = self._kv_cache.get_computed_blocks(request)
        num_new_tokens = self._kv_cache.whole_blocks(min(num_tokens, request.num_tokens - 1)) - hit.num_tokens
        if num_new_tokens <= 0 or not self._kv_cache.has_room_for(request, hit):
            return False
        if self._kv_cache.allocate_slots(request, num_new_tokens, hit) is None:
            return False
        request.num_computed_tokens = hit.num_tokens
        return True

    def note_loaded(self, request: Request, num_tokens: int) -> None:
        """Note how many leading tokens of a waiting request have their KV in its blocks; 0 frees the blocks."""
        if num_tokens <= 0:
            self._kv_cache.free(request)
            request.num_computed_tokens = 0
        else:
            # Only full blocks, since others may be cleared; and at least one token must run.
            num_loaded = self._kv_cache.whole_blocks(min(num_tokens, request.num_tokens - 1))
            request.num_computed_tokens = max(request.num_computed_tokens, num_loaded)

    def rewind_waiting(self) -> None:
        """Free the reserved blocks of all waiting requests."""
        for request in self._requests.waiting_holders():
            self.note_loaded(request, 0)

    def rewind_all(self, next_step_id: int) -> None:
        """Preempt all requests and drop the results of steps before this one, lost with their worker."""
        self.steps.clear()
        self._first_valid_step_id = next_step_id
        self.had_nan = False
        for request in reversed(self._requests.running.copy()):
            self.rewind(request)
        self.rewind_waiting()
        for request in self._requests.by_id.values():
            request.num_output_placeholders = 0

    def _take_due(self, message: SchedulerOutput, results: ModelRunnerOutput) -> Step | None:
        """Return the step of these results; None for a dropped step or one without tokens."""
        step_id = message.step_id
        if results.step_id != step_id:
            raise LifecycleError(
                f"The results of {_named(results.step_id, results.req_ids)} were handed in as those of "
                f"{_named(step_id, message.num_scheduled_tokens)}."
            )
        if step_id < self._first_valid_step_id or not message.num_scheduled_tokens:
            return None
        due = next(iter(self.steps), None)
        if step_id != due:
            is_due = "no results are due" if due is None else f"those of {_named(due, self.steps[due].req_ids)} are due"
            raise LifecycleError(
                f"The results of {_named(step_id, message.num_scheduled_tokens)} came out of turn: {is_due}. Results "
                "must come in the order of their steps, each once."
            )
        self._kv_cache.steps.last_done = step_id
        for pool in self._kv_cache.pools:
            if pool.pending:
                pool.free_pending()
        return self.steps.pop(step_id)

    def _void_lost_blocks(self, step: Step, results: ModelRunnerOutput) -> None:
        """Restart requests that read blocks which failed requests of this step did not fill."""
        served = set(results.req_ids).difference(results.errors)
        failed = {request for req_id, request in zip(step.req_ids, step.requests, strict=True) if req_id not in served}
        self._restart(*void_rows_that_read_lost_blocks(failed, [step, *self.steps.values()]))

    def void_loads(self, num_loaded: Mapping[Request, int]) -> None:
        """Drop the results of requests in the steps in flight, and restart them, with the blocks of so many tokens.

        Restarts those that read their other blocks, too.
        """
        lost_blocks, misled = void_rows_that_read_lost_blocks(set(num_loaded), self.steps.values())
        for step in self.steps.values():
            step.void_rows |= {row for row, request in enumerate(step.requests) if request in num_loaded}
        for request, num_tokens in num_loaded.items():
            lost_blocks -= self._kv_cache.blocks_before(request, num_tokens)
        self._restart(lost_blocks, misled | num_loaded.keys())

    def _restart(self, lost_blocks: set[KVCacheBlock], misled: set[Request]) -> None:
        """Forget the content of blocks, and restart requests that have read them."""
        self._kv_cache.forget_content(lost_blocks)
        for request in [request for request in self._requests.running if request in misled]:
            self.rewind_between_steps(request)
        for request in self._requests.waiting_holders():
            if self._kv_cache.holds_any(request, lost_blocks):
                self.note_loaded(request, 0)

    def _settle_row(
        self, step: Step, row: int, results: ModelRunnerOutput, first_rows: Sequence[int]
    ) -> EngineCoreOutput | None:
        """Take in one row of the results; the caller appends the new tokens of the output.

        first_rows: by row, its first row of log-probabilities.
        """
        request, max_new_tokens = step.requests[row], step.max_new_tokens[row]
        if row in step.void_rows:
            request.num_output_placeholders -= max_new_tokens
            return None
        if request.status is _FINISHED:
            return None
        if request.req_id in results.errors:
            if request.req_id in results.not_finite_req_ids:
                self._kv_cache.forget(request)
                given = request.parts and request.parts.given_values
                if given:
                    return self._fail(request, _NOT_FINITE.format(given), FinishReason.INVALID)
            is_invalid = request.req_id in results.invalid_req_ids
            reason = FinishReason.INVALID if is_invalid else FinishReason.ERROR
            return self._fail(request, results.errors[request.req_id], reason)
        if row >= len(results.req_ids):
            return self._fail(request, f"The worker's results of step {results.step_id} leave it out.")
        if not isinstance(results, SampledOutput):
            return self._settle_pooled(step, row, results)
        new_token_ids = results.sampled_token_ids[row]
        num_new_tokens = len(new_token_ids)
        if num_new_tokens > max_new_tokens or (num_new_tokens == 0 and max_new_tokens):
            due = f"1 to {max_new_tokens}" if max_new_tokens > 1 else str(max_new_tokens)
            return self._fail(
                request, f"The worker sampled {num_new_tokens} tokens in step {results.step_id} instead of {due}."
            )
        take_prompt_logprobs(request, results)
        if not new_token_ids:
            if request.pools:
                return self._fail(request, f"The worker pooled nothing in step {results.step_id}, but sampled.")
            self._kv_cache.cache_blocks(request, step.num_computed_tokens[row])
            return None
        request.num_output_placeholders -= max_new_tokens
        if max_new_tokens > 1:
            self._draft_budget.note_results(request, max_new_tokens - 1, num_new_tokens - 1)
            self.spec_decode_metrics.note(max_new_tokens - 1, num_new_tokens - 1)
        # A preempted request begins anew.
        if num_new_tokens < max_new_tokens and request.status is _RUNNING:
            request.num_computed_tokens -= max_new_tokens - num_new_tokens
        new_token_ids, finish_reason, stop_reason = tokens_to_end(request, new_token_ids)
        if finish_reason is None and results.logprobs is None and not request.has_news:
            return EngineCoreOutput(
                req_id=request.req_id, new_token_ids=new_token_ids, num_draft_tokens=max_new_tokens - 1
            )
        logprobs = None
        if results.logprobs is not None:
            rows = slice(first_rows[row], first_rows[row] + len(new_token_ids))
            logprobs = logprobs_of_rows(request, results.logprobs, rows)
        return make_output(
            request, new_token_ids, finish_reason, stop_reason, logprobs, num_draft_tokens=max_new_tokens - 1
        )

    def _settle_pooled(self, step: Step, row: int, results: PooledOutput) -> EngineCoreOutput | None:
        """Take in the pooled hidden states of a prompt."""
        request, pooled = step.requests[row], results.pooled[row]
        if not request.pools:
            return self._fail(request, f"The worker sampled nothing in step {results.step_id}, but pooled.")
        is_complete = step.num_computed_tokens[row] == request.num_tokens
        if is_complete is (pooled is None):
            what = "nothing" if pooled is None else "too early"
            return self._fail(request, f"The worker pooled {what} in step {results.step_id}.")
        self._kv_cache.cache_blocks(request, step.num_computed_tokens[row])
        return None if pooled is None else make_output(request, [], FinishReason.STOP, pooled=pooled)

    def _fail(self, request: Request, error: str, reason: FinishReason = FinishReason.ERROR) -> EngineCoreOutput:
        self._requests.finish(request)
        return make_output(request, [], reason, error=error)


def _go_on(step: Step, token_ids: Sequence[list[int]]) -> bool:
    """Whether each request of a step got one token, which ends none."""
    try:
        all_token_ids = [token_id for (token_id,) in token_ids]
    except ValueError:
        # A request got several tokens, or none.
        return False
    return step.end_token_ids.isdisjoint(all_token_ids)


def _rows_in_order(step: Step, req_ids: Sequence[str]) -> list[int]:
    """Return the rows of a step in the order of its results; rows without results come last."""
    rows = {req_id: row for row, req_id in enumerate(step.req_ids)}
    in_order = []
    for req_id in req_ids:
        if req_id not in rows:
            raise LifecycleError(f"Step {step.message.step_id} did not hold the request {req_id!r}.")
        in_order.append(rows.pop(req_id))
    return [*in_order, *rows.values()]


def _first_logprobs_rows(results: ModelRunnerOutput) -> Sequence[int]:
    """Return each row's first row of log-probabilities; empty without log-probabilities."""
    if not isinstance(results, SampledOutput) or results.logprobs is None:
        return ()
    return list(accumulate(map(len, results.sampled_token_ids), initial=0))


def _named(step_id: int, req_ids: Collection[str]) -> str:
    """Describe a step with its first requests, for errors."""
    first = ", ".join(islice(req_ids, _NUM_NAMED))
    more = f" and {len(req_ids) - _NUM_NAMED} more" if len(req_ids) > _NUM_NAMED else ""
    return f"step {step_id} (requests {first}{more})" if first else f"step {step_id} (no requests)"
