"""How many drafts each request verifies in its next step: as many as are measured to pay, down to none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.scheduler.acceptance import Acceptance
from penstock.scheduler.request import Request
from penstock.scheduler.step_times import StepTimes

# What a request's past counts after each step that verified drafts of it, and the engine's after each of any request's.
_REQUEST_MEMORY, _ENGINE_MEMORY = 0.9, 0.97
# How often the past counts of a request that verified nothing while others did: in the end it is tried again.
_IDLE_MEMORY = 0.97
# Drafts that stand for what is not known yet: of a request, the engine's past; of the engine, a guess.
_PRIOR_TRIED, _PRIOR_ACCEPTANCE = 4.0, 0.7
# What is left of the engine's past while it does without drafts, so that a probe tells it something new.
_PROBE_TRIED = 2.0
# Steps without drafts between two probes: they grow while probes bring nothing.
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 128
# Steps in which nobody has an idea, after which nobody is asked for a while.
_LONGEST_SILENCE, _SILENT_PAUSE = 16, 48
# Of a probe: one request in so many, and drafts of each.
_PROBED_SHARE, _PROBED_DRAFTS = 8, 2
# Steps in which somebody may have an idea, and those until its results are there.
_NUM_TRIES, _NUM_STEPS_TO_RESULTS = 3, 2
# Steps without drafts, to see how long they take: at first, and when there was none for so long. The first of them has
# the drafts of the step before.
_NUM_PLAIN_STEPS, _NUM_STEPS_TO_MEASURE, _MOST_STEPS_UNMEASURED = 4, 2, 100


class DraftBudget:
    """As many as there may be, for each request. num_speculative_tokens: of a request in a step, at most."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._most = num_speculative_tokens
        # Steps that may go by before `plan` is asked again.
        self.num_steps_planned = 10**9

    def plan(self, step_id: int, requests: Sequence[Request]) -> int:
        """Decide, for what follows this step, about the requests that run. Returns the drafts to make, at most."""
        return self._most

    def num_for(self, request: Request) -> int:
        """Drafts that the request verifies in its next step, at most."""
        own = request.sampling_params.num_speculative_tokens
        return self._most if own is None else min(own, self._most)

    def note_drafts(self) -> None:
        """Some request has drafts for its next step."""

    def note_results(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """What became of the drafts of a request in a step."""

    def note_time(self, num_reqs: int, num_drafts: int, seconds: float, *, speculates: bool) -> None:
        """How long a step took in which every request decoded. speculates: it verified drafts, or made some."""


class AdaptiveBudget(DraftBudget):
    """Follows what is measured: how many drafts are accepted, and how long steps take by their number of tokens.

    A step of R requests with m drafts brings R tokens and the expected number of accepted drafts, in the time of R + m
    tokens: m is where that is the most per second, and the drafts that are likeliest to be accepted come first. Where
    m = 0, no drafts are made at all for some steps, and a few requests are tried again then.
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
        """int64 [requests]: drafts of each with which the step brings the most tokens per second."""
        num_reqs = len(requests)
        if not num_reqs:
            return np.zeros(0, dtype=np.int64)
        overall = self._engine.accepted / self._engine.tried
        accepted = np.array([request.acceptance.accepted for request in requests])
        tried = np.array([request.acceptance.tried for request in requests])
        rates = (accepted + _PRIOR_TRIED * overall) / (tried + _PRIOR_TRIED)
        limits = np.array([DraftBudget.num_for(self, request) for request in requests])
        numbers = np.arange(1, self._most + 1)
        # A draft counts only if all before it were accepted.
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
        """Let a few requests, others each time, verify a few drafts once, and wait for what comes of it."""
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
