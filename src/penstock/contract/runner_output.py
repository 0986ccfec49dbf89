"""What a worker answers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.contract.array_bytes import ArrayBytes
from penstock.contract.parts import Parts


class LogprobsLists(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of tokens, a row for each.

    logprob_token_ids, logprobs: [rows][1 + max_num_logprobs]; column 0 is the sampled token, then the most likely.
    sampled_token_ranks: 1-based rank of the sampled token, the number of logits at least as large as its own.
    """

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What the results of all steps have.

    req_ids: the step's requests in batch order, as they were when the step was launched.
    errors: requests that this step could not serve, with the reason; the others are unaffected.
    not_finite_req_ids: those of them whose logits were not finite, so that their KV may hold NaN.
    parts: what features on the worker's side tell those on the scheduler's.
    """

    step_id: int
    req_ids: list[str] = []
    errors: dict[str, str] = {}
    not_finite_req_ids: list[str] = []
    parts: Parts | None = None


class SampledOutput(StepResult, frozen=True, kw_only=True, tag="sampled"):
    """The result of a step of an engine that generates.

    sampled_token_ids: per request, its new tokens; empty for a prefill that is not finished.
    logprobs: a row for each of these tokens, one request's after another's; None when no request asked.
    prompt_logprobs: for requests that asked, those of the prompt's tokens that follow the ones of this step; a prompt
        that takes several steps has its rows in all of them. Rows may be wider than the request asked for.
    """

    sampled_token_ids: list[list[int]] = []
    logprobs: LogprobsLists | None = None
    prompt_logprobs: dict[str, LogprobsLists] = {}


class PooledOutput(StepResult, frozen=True, kw_only=True, tag="pooled"):
    """The result of a step of an engine that pools.

    pooled: per request, what became of its hidden states; None for a prompt that is not finished.
    """

    pooled: list[ArrayBytes | None] = []


class DraftTokenIds(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's speculator thinks that requests go on with, after all tokens sampled so far.

    req_ids: of any requests that the worker holds. draft_token_ids: for each of them, in order.
    """

    req_ids: list[str] = []
    draft_token_ids: list[list[int]] = []


ModelRunnerOutput: TypeAlias = SampledOutput | PooledOutput
