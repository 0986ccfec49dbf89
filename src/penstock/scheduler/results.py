"""What a step's results mean for one request: whether it ends, and what its caller is told."""

from __future__ import annotations

from penstock.contract import LogprobsLists
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request


def check_stop(request: Request) -> tuple[FinishReason | None, int | None]:
    """Whether the request ends with its last token: the reason, and the stop token if it is one the user named.

    No token is an end token before there are min_tokens.
    """
    last_token_id = request.all_token_ids[-1]
    is_eos = last_token_id in request.eos_token_ids
    if is_eos or last_token_id in request.stop_token_ids:
        num_output_tokens = len(request.all_token_ids) - request.num_prompt_tokens
        if num_output_tokens >= request.sampling_params.min_tokens:
            return FinishReason.STOP, None if is_eos else last_token_id
    if len(request.all_token_ids) >= request.length_limit:
        return FinishReason.LENGTH, None
    return None, None


def logprobs_of_row(request: Request, logprobs: LogprobsLists | None, row: int) -> LogprobsLists | None:
    """The row of a step's log-probabilities that belongs to the request, None if it asked for none.

    A step's rows are as wide as its most demanding request wants; each gets the columns that it asked for.
    """
    num_logprobs = request.sampling_params.logprobs
    if logprobs is None or num_logprobs is None:
        return None
    num_columns = 1 + num_logprobs
    return LogprobsLists(
        logprob_token_ids=[logprobs.logprob_token_ids[row][:num_columns]],
        logprobs=[logprobs.logprobs[row][:num_columns]],
        sampled_token_ranks=[logprobs.sampled_token_ranks[row]],
    )


def make_output(
    request: Request,
    *,
    new_token_ids: list[int],
    new_logprobs: LogprobsLists | None = None,
    finish_reason: FinishReason | None = None,
    stop_reason: int | None = None,
    error: str | None = None,
) -> EngineCoreOutput:
    """News of a request, with what is known of its history."""
    return EngineCoreOutput(
        req_id=request.req_id,
        new_token_ids=new_token_ids,
        new_logprobs=new_logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=error,
        num_cached_tokens=max(0, request.num_cached_tokens),
        num_preemptions=request.num_preemptions,
        first_scheduled_time=request.first_scheduled_time,
    )
