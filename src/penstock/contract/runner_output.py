"""Results of a step from the worker."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.contract.array_bytes import ArrayBytes
from penstock.contract.parts import Parts


class LogprobsLists(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities, one row per token.

    logprob_token_ids, logprobs: [rows][1 + max_num_logprobs]; column 0 is the sampled token, then the most likely.
    sampled_token_ranks: 1-based rank of the sampled token, the number of logits at least as large as its own.
    """

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of step results.

    req_ids: the step's requests in batch order at its launch.
    errors: requests that this step could not serve, with the reason; the others are unaffected.
    not_finite_req_ids: failed requests with non-finite logits, whose KV may hold NaN.
    invalid_req_ids: failed requests whose own parameters are the cause.
    parts: data of features from the worker to the scheduler.
    """

    step_id: int
    req_ids: list[str] = []
    errors: dict[str, str] = {}
    not_finite_req_ids: list[str] = []
    invalid_req_ids: list[str] = []
    parts: Parts | None = None


class SampledOutput(StepResult, frozen=True, kw_only=True, tag="sampled"):
    """Result of a step with sampling.

    sampled_token_ids: new tokens per request; empty for a partial prefill.
    logprobs: one row per new token, in the order of the requests; None if not requested.
    prompt_logprobs: rows of the prompt tokens that follow those of this step, by request; a prefill of several chunks
        has rows in each. Rows may be wider than the request asked for.
    """

    sampled_token_ids: list[list[int]] = []
    logprobs: LogprobsLists | None = None
    prompt_logprobs: dict[str, LogprobsLists] = {}


class PooledOutput(StepResult, frozen=True, kw_only=True, tag="pooled"):
    """Result of a step of a pooling model.

    pooled: pooled hidden states per request; None for a partial prefill.
    """

    pooled: list[ArrayBytes | None] = []


class DraftTokenIds(msgspec.Struct, frozen=True, kw_only=True):
    """Draft tokens after all tokens sampled so far.

    req_ids: requests that the worker holds. draft_token_ids: per request, in order.
    """

    req_ids: list[str] = []
    draft_token_ids: list[list[int]] = []


ModelRunnerOutput: TypeAlias = SampledOutput | PooledOutput
