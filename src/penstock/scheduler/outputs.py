"""Outputs of the scheduler to the engine after each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from penstock.contract import ArrayBytes, LogprobsLists, Parts


class FinishReason(StrEnum):
    """Reason why a request ended, with the values of the OpenAI API where it has them.

    INVALID: an error that the request itself causes, such as a schema that nothing satisfies.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    INVALID = "invalid"

    @property
    def shown(self) -> str:
        """Name in outputs, where an invalid request has an error as others have."""
        return "error" if self is FinishReason.INVALID else self.value


class CoreState(msgspec.Struct, frozen=True):
    """State of a core. name: "running", or why it runs no steps. is_ready: whether a request would run at once.

    why_stuck: sentences that say what a caller must do before requests go on; "" if they will by themselves.
    is_update: whether the caller has begun to do it. is_pause: whether it is for the thread to do that has let it rest.
    """

    name: str = "running"
    is_ready: bool = True
    why_stuck: str = ""
    is_update: bool = False
    is_pause: bool = False


RUNNING = CoreState()


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and KV cache blocks of one scheduler, or of several together, at one moment.

    num_blocks: usable blocks of token positions. num_used_blocks: held ones. num_cached_blocks: further ones, of the
        prefix cache.
    num_computed_tokens: tokens of all steps so far.
    num_states: usable blocks of recurrent states. num_used_states: held ones. num_snapshots: states that are kept
        for later requests, without superseded ones. num_snapshots_taken, num_snapshots_evicted: so far; evicted are
        those that made room before they were superseded.
    num_encoder_tokens: tokens of media items for whose features the encoder cache has room. num_used_encoder_tokens: of
        items that running requests use. num_cached_encoder_tokens: of further ones with features. num_encoder_queries,
        num_encoder_hits: items that requests have looked up, and found, so far.
    counters: counts of features that only rise (`Feature.counters`). gauges: values of features now.
    weight_version: of the newest weights that are complete, which rises with each update; 0 for those of the start.
    state: of the core; of several, of one that is not ready, or does not run.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    num_blocks: int
    num_used_blocks: int
    num_computed_tokens: int = 0
    num_cached_blocks: int = 0
    num_states: int = 0
    num_used_states: int = 0
    num_snapshots: int = 0
    num_snapshots_taken: int = 0
    num_snapshots_evicted: int = 0
    num_encoder_tokens: int = 0
    num_used_encoder_tokens: int = 0
    num_cached_encoder_tokens: int = 0
    num_encoder_queries: int = 0
    num_encoder_hits: int = 0
    counters: dict[str, int] = {}
    gauges: dict[str, float] = {}
    weight_version: int = 0
    state: CoreState = RUNNING

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache that requests hold, 0 to 1: of blocks or of states, whichever is larger."""
        return max(
            self.num_used_blocks / max(1, self.num_blocks),
            self.num_used_states / max(1, self.num_states),
        )

    @property
    def encoder_cache_usage(self) -> float:
        """Share of the encoder cache that has features, 0 to 1."""
        filled = self.num_used_encoder_tokens + self.num_cached_encoder_tokens
        return filled / max(1, self.num_encoder_tokens)


NO_STATS = SchedulerStats(num_running_reqs=0, num_waiting_reqs=0, num_blocks=0, num_used_blocks=0)


def summed_stats(stats: Iterable[SchedulerStats]) -> SchedulerStats:
    """Sum of the counts of several schedulers."""
    each = list(stats)
    state = min((one.state for one in each), key=lambda state: (state.is_ready, state == RUNNING), default=RUNNING)
    counts = {name: sum(getattr(one, name) for one in each) for name in SchedulerStats.__struct_fields__[:-4]}
    counters: Counter[str] = Counter()
    gauges: dict[str, float] = {}
    for one in each:
        counters.update(one.counters)
        gauges |= {name: gauges.get(name, 0.0) + value for name, value in one.gauges.items()}
    version = max((one.weight_version for one in each), default=0)
    return SchedulerStats(**counts, counters=dict(counters), gauges=gauges, weight_version=version, state=state)


class _NewTokens(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Positional fields of an output, all that most outputs have: `map` makes those of a step."""

    req_id: str
    new_token_ids: list[int] = []


class EngineCoreOutput(_NewTokens, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Output of one request from one step.

    new_token_ids: usually one, more with accepted draft tokens; empty for a request that ends without any (aborted,
        failed).
    new_logprobs: one row per new token, if requested.
    prompt_logprobs: with the first token, one row per prompt token but the first, if requested.
    num_draft_tokens: draft tokens that the step verified.
    pooled: pooled hidden states of the prompt, at the end of a pooling request.
    parts: data of features for the caller, since the last output.
    stop_reason: the stop token that ended the request, if it is one of `stop_token_ids`; else None.
    error: error text, for finish_reason ERROR and INVALID.

    The request's history comes with its first token, with the first after a preemption, and with its end:
    num_cached_tokens: prefix-cache hit in prompt tokens, when the request first ran.
    first_scheduled_time: seconds of `time.monotonic`; None without history, or if the request never ran.
    """

    num_draft_tokens: int = 0
    new_logprobs: LogprobsLists | None = None
    prompt_logprobs: LogprobsLists | None = None
    pooled: ArrayBytes | None = None
    parts: Parts | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
