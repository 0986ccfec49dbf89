"""Results of a step for one request: end of generation, log-probabilities and output."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.contract import ArrayBytes, LogprobsLists, Parts, SampledOutput
from penstock.contract.parts import OutputPart
from penstock.contract.sampling_params import ALL_LOGPROBS
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request


def tokens_to_end(request: Request, new_token_ids: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
    """Cut sampled tokens at the end of the request.

    Returns the tokens, the finish reason, and the stop token if it is one of `stop_token_ids`. End tokens count from
    min_tokens on.
    """
    num_tokens = len(request.all_token_ids)
    if request.end_token_ids.isdisjoint(new_token_ids) and num_tokens + len(new_token_ids) < request.length_limit:
        return new_token_ids, None, None
    num_output_tokens = request.num_output_tokens
    for index, token_id in enumerate(new_token_ids, start=1):
        if token_id in request.end_token_ids and num_output_tokens + index >= request.sampling_params.min_tokens:
            stop_reason = None if token_id in request.eos_token_ids else token_id
            return new_token_ids[:index], FinishReason.STOP, stop_reason
        if num_tokens + index >= request.length_limit:
            return new_token_ids[:index], FinishReason.LENGTH, None
    return new_token_ids, None, None


def logprobs_of_rows(request: Request, logprobs: LogprobsLists | None, rows: slice) -> LogprobsLists | None:
    """Return the request's rows and columns of a step's log-probabilities; None if it asked for none.

    A step's rows have as many columns as its most demanding request wants.
    """
    num_logprobs = request.sampling_params.logprobs
    if logprobs is None or num_logprobs is None:
        return None
    num_columns = _num_columns(num_logprobs)
    return LogprobsLists(
        logprob_token_ids=[row[:num_columns] for row in logprobs.logprob_token_ids[rows]],
        logprobs=[row[:num_columns] for row in logprobs.logprobs[rows]],
        sampled_token_ranks=logprobs.sampled_token_ranks[rows],
    )


def take_prompt_logprobs(request: Request, results: SampledOutput) -> None:
    """Append a step's prompt log-probabilities to those of the request."""
    rows = results.prompt_logprobs.get(request.req_id)
    num_logprobs, kept = request.sampling_params.prompt_logprobs, request.prompt_logprobs
    if rows is None or num_logprobs is None or kept is None:
        return
    num_columns = _num_columns(num_logprobs)
    kept.logprob_token_ids.extend(row[:num_columns] for row in rows.logprob_token_ids)
    kept.logprobs.extend(row[:num_columns] for row in rows.logprobs)
    kept.sampled_token_ranks.extend(rows.sampled_token_ranks)


def _num_columns(num_logprobs: int) -> int | None:
    """Return the columns per row: the sampled token and the most likely ones; None for all."""
    return None if num_logprobs == ALL_LOGPROBS else 1 + num_logprobs


def with_part(output: EngineCoreOutput, part: OutputPart | None) -> EngineCoreOutput:
    """Return the output with a further part."""
    if part is None:
        return output
    return replace(output, parts=Parts.of([*(output.parts or {}).values(), part]))


def make_output(
    request: Request,
    new_token_ids: list[int],
    finish_reason: FinishReason | None,
    stop_reason: int | None = None,
    new_logprobs: LogprobsLists | None = None,
    error: str | None = None,
    pooled: ArrayBytes | None = None,
    num_draft_tokens: int = 0,
) -> EngineCoreOutput:
    """Return a request's output with its history, and its prompt log-probabilities with the first token."""
    prompt_logprobs = request.prompt_logprobs if new_token_ids else None
    if new_token_ids:
        request.prompt_logprobs, request.has_news = None, False
    return EngineCoreOutput(
        req_id=request.req_id,
        new_token_ids=new_token_ids,
        num_draft_tokens=num_draft_tokens,
        new_logprobs=new_logprobs,
        prompt_logprobs=prompt_logprobs,
        pooled=pooled,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=error,
        num_cached_tokens=max(0, request.num_cached_tokens),
        num_preemptions=request.num_preemptions,
        first_scheduled_time=request.first_scheduled_time,
    )
