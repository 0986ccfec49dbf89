"""Sums of metrics: counters and histograms that several processes count, and that add up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec

from penstock.engine.output.outputs import RequestMetrics
from penstock.engine.statistics.step_phases import StepPhase
from penstock.errors import InvalidRequest, Overloaded
from penstock.scheduler.acceptance import SpecDecodeMetrics
from penstock.scheduler.outputs import FinishReason

# Upper bounds of the buckets of histograms: seconds of a request, of a token, and of a phase of a step, and numbers of
# tokens.
_REQUEST_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    *(10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
)
_TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1.0, 2.0, 5.0, 10.0),
)
_PHASE_SECONDS = tuple(digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5))
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Totals(msgspec.Struct):
    """Counts that add up, field by field. Tuples, such as the bounds of a histogram, are equal in all."""

    def add(self, other: Self) -> None:
        """Add the counts of others."""
        for name in self.__struct_fields__:
            setattr(self, name, _sum(getattr(self, name), getattr(other, name)))


def _sum(mine: Any, its: Any) -> Any:
    if isinstance(mine, (Totals, SpecDecodeMetrics)):
        mine.add(its)
        return mine
    if isinstance(mine, dict):
        return {**mine, **{key: _sum(mine[key], value) if key in mine else value for key, value in its.items()}}
    if isinstance(mine, list):
        return [_sum(*pair) for pair in zip(mine, its, strict=True)]
    return mine if isinstance(mine, tuple) else mine + its


class Observations(Totals):
    """Histogram. bounds: upper bounds of its buckets. counts: values by bucket, the last one beyond all bounds."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Observations:
        """Empty histogram."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def note(self, value: float, count: int = 1) -> None:
        """Count a value that was observed so many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


# Histograms of requests that have ended: their bounds, and the value of a request. None is not counted.
_AT_THE_END: dict[str, tuple[tuple[float, ...], Callable[[RequestMetrics], float | None]]] = {
    "request_time_per_output_token_seconds": (_TOKEN_SECONDS, lambda metrics: metrics.time_per_output_token_s),
    "request_queue_time_seconds": (_REQUEST_SECONDS, lambda metrics: metrics.time_in_queue_s),
    "request_prefill_time_seconds": (_REQUEST_SECONDS, lambda metrics: metrics.prefill_time_s),
    "request_decode_time_seconds": (_REQUEST_SECONDS, lambda metrics: metrics.decode_time_s),
    "request_inference_time_seconds": (_REQUEST_SECONDS, lambda metrics: metrics.inference_time_s),
    "e2e_request_latency_seconds": (_REQUEST_SECONDS, lambda metrics: metrics.latency_s),
}


class RequestTotals(Totals):
    """Counters and histograms of the requests of one front end, or of several together.

    num_queried_tokens: prompt tokens that were looked up in the prefix cache; num_cached_tokens: found there.
    num_media_queries: media items that were looked up among processed ones; num_media_hits: found there.
    num_ended: ended requests by `FinishReason`. num_refused: requests that no core admitted, by reason.
    """

    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_media_queries: int = 0
    num_media_hits: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    drafts: SpecDecodeMetrics = msgspec.field(default_factory=SpecDecodeMetrics)
    num_ended: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(map(str, FinishReason), 0))
    num_refused: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(("queue_full", "invalid", "error"), 0)
    )
    time_to_first_token: Observations = msgspec.field(default_factory=lambda: Observations.of(_REQUEST_SECONDS))
    inter_token_latency: Observations = msgspec.field(default_factory=lambda: Observations.of(_TOKEN_SECONDS))
    prompt_tokens: Observations = msgspec.field(default_factory=lambda: Observations.of(_TOKENS))
    generation_tokens: Observations = msgspec.field(default_factory=lambda: Observations.of(_TOKENS))
    max_tokens: Observations = msgspec.field(default_factory=lambda: Observations.of(_TOKENS))
    at_the_end: dict[str, Observations] = msgspec.field(
        default_factory=lambda: {name: Observations.of(bounds) for name, (bounds, _) in _AT_THE_END.items()}
    )

    @property
    def histograms(self) -> dict[str, Observations]:
        """Histograms by name."""
        return {
            "time_to_first_token_seconds": self.time_to_first_token,
            "inter_token_latency_seconds": self.inter_token_latency,
            "request_prompt_tokens": self.prompt_tokens,
            "request_generation_tokens": self.generation_tokens,
            "request_params_max_tokens": self.max_tokens,
            **self.at_the_end,
        }

    def note_counts(self, num_prompt_tokens: int, metrics: RequestMetrics, *, has_prefix_cache: bool) -> None:
        """Count the tokens of a request so far."""
        # A request that was never scheduled has computed no prompt tokens.
        if metrics.first_scheduled_time is not None:
            self.num_prompt_tokens += num_prompt_tokens
            self.num_queried_tokens += num_prompt_tokens if has_prefix_cache else 0
        self.num_cached_tokens += metrics.num_cached_tokens
        self.num_generated_tokens += metrics.num_generated_tokens
        self.num_preemptions += metrics.num_preemptions
        self.drafts.add(metrics.spec_decode_metrics)

    def note_end(
        self, reason: FinishReason, num_prompt_tokens: int, metrics: RequestMetrics, max_tokens: int | None = None
    ) -> None:
        """Count the end of a request, whose tokens `note_counts` counts. max_tokens: its parameter."""
        self.num_ended[reason] += 1
        if max_tokens is not None:
            self.max_tokens.note(max_tokens)
        if metrics.first_scheduled_time is not None:
            self.prompt_tokens.note(num_prompt_tokens)
            self.generation_tokens.note(metrics.num_generated_tokens)
        for name, (_, value_of) in _AT_THE_END.items():
            if (value := value_of(metrics)) is not None:
                self.at_the_end[name].note(value)

    def note_refusal(self, error: BaseException) -> None:
        """Count a request that no core admitted."""
        reason = "error"
        if isinstance(error, Overloaded):
            reason = "queue_full"
        elif isinstance(error, InvalidRequest):
            reason = "invalid"
        self.num_refused[reason] += 1

    def note_first_token(self, now: float, arrival: float) -> None:
        """Observe the time of a request's first token."""
        self.time_to_first_token.note(now - arrival)

    def note_later_tokens(self, num_by_last: Mapping[float, int], num_accepted: int, now: float) -> None:
        """Observe the gaps before a step's tokens, of all its requests.

        num_by_last: number of requests by the time of the token before. num_accepted: tokens that the step accepted
        from drafts, which arrive with another one: the gaps before them are 0.
        """
        for last, num_reqs in num_by_last.items():
            self.inter_token_latency.note(now - last, num_reqs)
        self.inter_token_latency.counts[0] += num_accepted


class StepTotals(Totals):
    """Steps of one core, or of several together.

    seconds: time of a step, from the decision what runs to the outputs of the step before or of itself. tokens: its
    computed tokens. phases: its time by `StepPhase`.
    """

    seconds: Observations = msgspec.field(default_factory=lambda: Observations.of(_TOKEN_SECONDS))
    tokens: Observations = msgspec.field(default_factory=lambda: Observations.of(_TOKENS))

    phases: dict[str, Observations] = msgspec.field(
        default_factory=lambda: {phase.value: Observations.of(_PHASE_SECONDS) for phase in StepPhase}
    )

    def note(self, seconds: float, num_tokens: int, phase_s: Mapping[str, float]) -> None:
        """Count a step. phase_s: seconds by phase; a step need not have all."""
        self.seconds.note(seconds)
        self.tokens.note(num_tokens)
        for phase, phase_seconds in phase_s.items():
            self.phases[phase].note(phase_seconds)
