"""Draft length per request and step, chosen for the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.scheduler.acceptance import Acceptance
from penstock.scheduler.request import Request
from penstock.scheduler.step_times import StepTimes

# Decay of acceptance statistics per step with draft tokens: of the request, and of the engine.
_REQUEST_MEMORY, _ENGINE_MEMORY = 0.9, 0.97
# Decay of a request without draft tokens while others have some, so that it is tried again in the end.
_IDLE_MEMORY = 0.97
# Prior of the acceptance rate, in draft tokens: the engine's rate for a request, a guess for the engine.
_PRIOR_TRIED, _PRIOR_ACCEPTANCE = 4.0, 0.7
# Statistics kept, in draft tokens, when speculation pauses, so that a probe can change the decision.
_PROBE_TRIED = 2.0
# Steps without draft tokens between two probes: they double while probes bring nothing.
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 128
# Steps in which the speculator proposed nothing, after which it pauses.
_LONGEST_SILENCE, _SILENT_PAUSE = 16, 48
# Probe: share of the requests, and draft tokens of each.
_PROBED_SHARE, _PROBED_DRAFTS = 8, 2
# Probe: steps in which the speculator may propose draft tokens, and steps until their results.
_NUM_TRIES, _NUM_STEPS_TO_RESULTS = 3, 2
# Steps without draft tokens, to measure their time: at first, and after so many speculating steps. The first of them
# still has the draft tokens of the step before.
_NUM_PLAIN_STEPS, _NUM_STEPS_TO_MEASURE, _MOST_STEPS_UNMEASURED = 4, 2, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding of an engine, as its scheduler sees it.

    num_speculative_tokens: draft tokens that the device makes for each request after a step that sampled for it. With
        asynchronous scheduling the request's next step verifies them, except for requests whose tokens the host must
        see first; otherwise only draft tokens of `Scheduler.update_draft_token_ids` are verified.
    num_lookahead_tokens: tokens beyond those of a step that a speculator may write to the KV cache.
    blocks_need_next_token: see `KVCacheManager`.
    step_times: model of step times, for adaptive draft lengths; None always uses the full length.
    """

    num_speculative_tokens: int = 0
    num_lookahead_tokens: int = 0
    blocks_need_next_token: bool = False
    step_times: StepTimes | None = None

    def make_budget(self, *, measures_time: bool) -> DraftBudget:
        """Return the draft budget. measures_time: whether `note_time` is called."""
        if self.step_times is None:
            return DraftBudget(self.num_speculative_tokens)
        return AdaptiveBudget(self.num_speculative_tokens, self.step_times, measures_time=measures_time)


NO_SPECULATION = Speculation()


class DraftBudget:
    """Fixed draft length. num_speculative_tokens: maximum draft tokens per request and step."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._most = num_speculative_tokens
        # Steps until `plan` must be called again.
        self.num_steps_planned = 10**9

    def plan(self, step_id: int, requests: Sequence[Request]) -> int:
        """Decide draft lengths of the running requests after this step; return the longest."""
        return self._most

    def num_for(self, request: Request) -> int:
        """Return the maximum draft length of the request in its next step."""
        own = request.sampling_params.num_speculative_tokens
        return self._most if own is None else min(own, self._most)

    def note_drafts(self) -> None:
        """Note that some request has draft tokens for its next step."""

    def note_results(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Note verified draft tokens of a request."""

    def note_time(self, num_reqs: int, num_drafts: int, seconds: float, *, speculates: bool) -> None:
        """Note the time of a decode step. speculates: it verified or made draft tokens."""


class AdaptiveBudget(DraftBudget):
    """Draft lengths by measured acceptance rates and step times.

    A step of R requests with m draft tokens brings R tokens and the expected number of accepted draft tokens, in the
    time of R + m tokens: m maximises tokens per second, with the likeliest draft tokens first. With m = 0 speculation
    pauses for some steps; then a probe tries a few requests again.
    """

    def __init__(self, num_speculative_tokens: int, times: StepTimes, *, measures_time: bool) -> None:
        """measures_time: whether `note_time` is called."""
        super().__init__(num_speculative_tokens)
        self._times = times
        self._measures_time = measures_time
        self._engine = Acceptance(_PRIOR_ACCEPTANCE * _PRIOR_TRIED, _PRIOR_TRIED)
        self._pause = _FIRST_PAUSE
        self._paused_until = _NUM_PLAIN_STEPS if measures_time else 0
        self._is_paused = False
        self._num_probes = self._num_tries_left = self._probe_began = 0
        self._last_drafts_at = self._step_id = 0

    def plan(self, step_id: int, requests: Sequence[Request]) -> int:
        self._step_id = step_id
        if step_id < self._paused_until:
            self.num_steps_planned = self._paused_until - step_id
            return self._give(requests, None)
        if self._is_paused:
            self._is_paused, self._num_tries_left, self._probe_began = False, _NUM_TRIES, step_id
            self._num_probes += 1
        if self._num_tries_left > 0:
            return self._probe(requests)
        self.num_steps_planned = _LONGEST_SILENCE
        if step_id - self._last_drafts_at >= _LONGEST_SILENCE:
            return self._stop(requests, _SILENT_PAUSE)
        if self._measures_time and step_id - self._paused_until >= _MOST_STEPS_UNMEASURED:
            self._paused_until = step_id + _NUM_STEPS_TO_MEASURE
            self.num_steps_planned = _NUM_STEPS_TO_MEASURE
            return self._give(requests, None)
        counts = self._best_counts(requests)
        if not counts.any():
            pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            return self._stop(requests, pause)
        if self._engine.tried > 2 * _PRIOR_TRIED:
            self._pause = _FIRST_PAUSE
        return self._give(requests, counts)

    def num_for(self, request: Request) -> int:
        return min(super().num_for(request), request.num_drafts_planned)

    def note_drafts(self) -> None:
        self._last_drafts_at = self._step_id

    def note_results(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        past = request.acceptance
        past.scale(_REQUEST_MEMORY)
        past.note(num_drafts, num_accepted)
        self._engine.scale(_ENGINE_MEMORY)
        self._engine.note(num_drafts, num_accepted)

    def note_time(self, num_reqs: int, num_drafts: int, seconds: float, *, speculates: bool) -> None:
        self._times.note(num_reqs, num_drafts, seconds, speculates=speculates)

    def _best_counts(self, requests: Sequence[Request]) -> np.ndarray:
        """Return draft lengths with the most tokens per second: int64 [requests]."""
        num_reqs = len(requests)
        if not num_reqs:
            return np.zeros(0, dtype=np.int64)
        overall = self._engine.accepted / self._engine.tried
        accepted = np.array([request.acceptance.accepted for request in requests])
        tried = np.array([request.acceptance.tried for request in requests])
        rates = (accepted + _PRIOR_TRIED * overall) / (tried + _PRIOR_TRIED)
        limits = np.array([DraftBudget.num_for(self, request) for request in requests])
        numbers = np.arange(1, self._most + 1)
        # A draft token counts only if all before it were accepted.
        chances = np.where(numbers <= limits[:, np.newaxis], rates[:, np.newaxis] ** numbers, 0.0).ravel()
        order = np.argsort(-chances, kind="stable")
        num_tokens = num_reqs + np.concatenate([[0.0], np.cumsum(chances[order])])
        seconds = self._times.seconds(num_reqs, len(order))
        best = int(np.argmax(num_tokens / seconds))
        best = min(best, int((chances > 0.0).sum()))
        return np.bincount(order[:best] // self._most, minlength=num_reqs)

    def _give(self, requests: Sequence[Request], counts: np.ndarray | None) -> int:
        for request, count in zip(requests, [0] * len(requests) if counts is None else counts.tolist(), strict=True):
            request.num_drafts_planned = count
            if counts is not None and not count:
                request.acceptance.scale(_IDLE_MEMORY)
        return 0 if counts is None else int(counts.max(initial=0))

    def _stop(self, requests: Sequence[Request], pause: int) -> int:
        self._paused_until = self._step_id + pause
        self.num_steps_planned = pause
        self._is_paused = True
        if self._engine.tried > _PROBE_TRIED:
            self._engine.scale(_PROBE_TRIED / self._engine.tried)
        for request in requests:
            if request.acceptance.tried > _PROBE_TRIED:
                request.acceptance.scale(_PROBE_TRIED / request.acceptance.tried)
        return self._give(requests, None)

    def _probe(self, requests: Sequence[Request]) -> int:
        """Let a few requests, others each time, verify a few draft tokens once, and wait for the results."""
        self._num_tries_left -= 1
        self.num_steps_planned = 1
        if self._last_drafts_at >= self._probe_began:
            self._num_tries_left = 0
            self._paused_until = self._step_id + _NUM_STEPS_TO_RESULTS
            return self._give(requests, None)
        num_probed = -(-len(requests) // _PROBED_SHARE)
        counts = np.zeros(len(requests), dtype=np.int64)
        counts[(np.arange(num_probed) + self._num_probes * num_probed) % max(1, len(requests))] = _PROBED_DRAFTS
        return self._give(requests, np.minimum(counts, self._most))
