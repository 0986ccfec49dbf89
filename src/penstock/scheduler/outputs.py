"""What the scheduler reports to the engine after each step."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from penstock.contract import ArrayBytes, LogprobsLists


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the OpenAI API, where it has them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and KV-cache blocks of one scheduler, or of several together, at one moment.

    num_blocks: that requests may hold. num_used_blocks: that they hold.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    num_blocks: int
    num_used_blocks: int


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What one step brought one request.

    new_token_ids: usually one, more where drafts were accepted; empty when a request ends without any (aborted,
        failed).
    new_logprobs: one row per new token, when the request asked for them.
    prompt_logprobs: with the first token, one row per token of the prompt but the first, when the request asked.
    num_draft_tokens: drafts that the step verified for it.
    pooled: what became of the prompt's hidden states, with the end of a request that pools.
    stop_reason: the stop token that ended the request, when it is one of `stop_token_ids`; else None.
    error: what went wrong, when finish_reason is ERROR.

    The request's history comes with its first token, with the first after a preemption, and with its end:
    num_cached_tokens: prompt tokens whose KV came from the prefix cache when the request first ran.
    first_scheduled_time: monotonic seconds (time.monotonic); None where the history is left out, or the request never
        ran.
    """

    req_id: str
    new_token_ids: list[int] = []
    num_draft_tokens: int = 0
    new_logprobs: LogprobsLists | None = None
    prompt_logprobs: LogprobsLists | None = None
    pooled: ArrayBytes | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
