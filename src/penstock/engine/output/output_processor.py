"""Output processing: turns the core's tokens into text, log-probabilities and metrics of each request.

This runs after every step for every running request, so a token costs a few dictionary look-ups, and `RequestOutput`
objects are built only on demand.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.config.reasoning import ReasoningMarkers
from penstock.contract import SamplingParams
from penstock.engine.messages import EngineRequest
from penstock.engine.output.fan_out import FanOut, sample_requests
from penstock.engine.output.outputs import RequestMetrics
from penstock.engine.output.progress import Inbox, Progress, RequestProgress
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.engine.statistics.metrics import EngineMetrics, Metric
from penstock.errors import InvalidRequest
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason, SchedulerStats
from penstock.text.stop_strings import StopStrings
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.structured.final_check import FinalCheck

logger = logging.getLogger(__name__)


def _stop_strings(params: SamplingParams) -> StopStrings | None:
    return StopStrings(params.stop) if params.stop else None


@dataclass(slots=True)
class FollowUp:
    """Requests to submit to the core and to abort after a step's outputs."""

    requests_to_add: list[EngineRequest] = field(default_factory=list)
    req_ids_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """Tracks the running requests, and updates each from the core's outputs.

    metrics: metrics to update.
    shared_prompt_length: minimum prompt tokens for samples to share blocks; None if they never can.
    reasoning: markers of the reasoning that constraints wait for; None if they begin with the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: EngineMetrics | None = None,
        *,
        shared_prompt_length: int | None = None,
        reasoning: ReasoningMarkers | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics or EngineMetrics("", has_prefix_cache=shared_prompt_length is not None)
        self._shared_prompt_length = shared_prompt_length
        self._reasoning = reasoning
        # By the core's ids: a request with n samples is n requests to the core.
        self._running: dict[str, RequestProgress] = {}
        self._fan_outs: dict[str, FanOut] = {}
        self._news: list[FanOut] = []

    def __len__(self) -> int:
        """Number of running requests of the core."""
        return len(self._running)

    def add(self, request: EngineRequest, prompt: str | None, inbox: Inbox) -> tuple[Progress, list[EngineRequest]]:
        """Track a request. Its progress is appended to `inbox` after every step with an output of it.

        Returns its progress, and the requests to submit to the core at once.
        Raises InvalidRequest when a running request has the same id.
        """
        if request.req_id in self._running or request.req_id in self._fan_outs:
            raise InvalidRequest(f"request_id={request.req_id!r} is that of a running request. Choose another.")
        if request.sampling_params.n > 1:
            fan_out = self._fan_out(request, prompt, inbox)
            return fan_out, fan_out.first_requests()
        stops, check = _stop_strings(request.sampling_params), self._final_check_of(request.sampling_params)
        progress = RequestProgress(request, prompt, self._tokenizer, inbox, stops=stops, final_check=check)
        self._running[request.req_id] = progress
        return progress, [request]

    def process(self, outputs: Iterable[EngineCoreOutput]) -> FollowUp | None:
        """Process a step's outputs; outputs of unknown requests are dropped.

        Returns the requests to submit and abort; None if there are none, as in most steps.
        """
        now = time.monotonic()
        running = self._running
        # Most requests had their last token in the same step: the metrics take them together.
        num_by_last: dict[float, int] = {}
        num_accepted = 0
        follow_up: FollowUp | None = None
        for output in outputs:
            progress = running.get(output.req_id)
            if progress is None:
                continue
            num_before, last = len(progress.token_ids), progress.last_token_time
            try:
                progress.advance(output, now)
            except Exception as error:
                progress.fail(error, now)
            if output.new_token_ids:
                num_new = len(progress.token_ids) - num_before
                if last is None:
                    self._metrics.note_first_token(now, progress.request.arrival_time)
                else:
                    num_by_last[last] = num_by_last.get(last, 0) + 1
                if num_new > 1:
                    num_accepted += num_new - 1
            if progress.finish_reason is not None:
                del running[output.req_id]
                self._note_end(progress, progress.finish_reason)
                if output.finish_reason is None:
                    follow_up = follow_up or FollowUp()
                    follow_up.req_ids_to_abort.append(output.req_id)
            progress.inbox.append(progress)
        self._metrics.note_later_tokens(num_by_last, num_accepted, now)
        if self._news:
            follow_up = follow_up or FollowUp()
            self._announce(follow_up)
        return follow_up

    def count_media(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Take the counts of media items into the metrics; see `EngineMetrics.media_counts`."""
        self._metrics.media_counts = counts

    def metrics(self, stats: SchedulerStats) -> list[Metric]:
        """Metrics of all requests so far. stats: of the core."""
        return self._metrics.read(stats, self._metrics_so_far())

    def totals(self) -> RequestTotals:
        """Counters and histograms of all requests so far, as a copy."""
        return self._metrics.totals(self._metrics_so_far())

    def request_of(self, core_id: str) -> Progress | None:
        """Progress of the caller's request to which a core's id belongs; None if it is unknown."""
        progress = self._running.get(core_id)
        return progress.inbox if progress is not None and isinstance(progress.inbox, FanOut) else progress

    def core_ids(self, req_ids: Iterable[str]) -> list[str]:
        """Core ids of these requests, as far as they run."""
        ids = []
        for req_id in req_ids:
            fan_out = self._fan_outs.get(req_id)
            names = [req_id] if fan_out is None else [sample.req_id for sample in fan_out.samples]
            ids += [name for name in names if name in self._running]
        return ids

    def forget(self, req_ids: Iterable[str], refusal: BaseException | None = None) -> list[str]:
        """Stop tracking these requests. refusal: why no core admitted them, if so. Returns their core ids."""
        names = list(req_ids)
        core_ids = self.core_ids(names)
        for core_id in core_ids:
            progress = self._running.pop(core_id)
            if refusal is None:
                self._note_end(progress, FinishReason.ABORT)
            else:
                self._metrics.note_refusal(refusal)
        for name in names:
            self._fan_outs.pop(name, None)
        return core_ids

    def _metrics_so_far(self) -> Iterator[tuple[int, RequestMetrics]]:
        """Prompt tokens and metrics of each running request."""
        return ((len(progress.request.prompt_token_ids), progress.metrics()) for progress in self._running.values())

    def _note_end(self, progress: RequestProgress, reason: FinishReason) -> None:
        request = progress.request
        max_tokens = request.sampling_params.max_tokens
        self._metrics.note_end(reason, len(request.prompt_token_ids), progress.metrics(), max_tokens)

    def _fan_out(self, request: EngineRequest, prompt: str | None, inbox: Inbox) -> FanOut:
        length = self._shared_prompt_length
        shares_prompt = length is not None and len(request.prompt_token_ids) >= length
        fan_out = FanOut(request, inbox, self._news, shares_prompt=shares_prompt)
        samples = sample_requests(request)
        if not self._running.keys().isdisjoint(sample.req_id for sample in samples):
            raise InvalidRequest(
                f"request_id={request.req_id!r} with n={len(samples)} needs the names {samples[0].req_id!r} to "
                f"{samples[-1].req_id!r}, one of which a running request has. Choose another."
            )
        stops, check = _stop_strings(request.sampling_params), self._final_check_of(request.sampling_params)
        for index, sample in enumerate(samples):
            fan_out.samples.append(RequestProgress(sample, prompt, self._tokenizer, fan_out, index, stops, check))
        self._fan_outs[request.req_id] = fan_out
        self._running |= {sample.req_id: sample for sample in fan_out.samples}
        return fan_out

    def _final_check_of(self, params: SamplingParams) -> FinalCheck | None:
        """Check of whole outputs by the schema of a request that asks for it; None for others."""
        constraint = params.structured_outputs
        return self._final_check if constraint is not None and constraint.unenforced == "check" else None

    @functools.cached_property
    def _final_check(self) -> FinalCheck:
        # Imported on first use.
        from penstock.structured.final_check import FinalCheck

        return FinalCheck(self._tokenizer, self._reasoning)

    def _announce(self, follow_up: FollowUp) -> None:
        news = self._news.copy()
        self._news.clear()
        for fan_out in news:
            follow_up.requests_to_add += fan_out.next_requests()
            if fan_out.finished:
                self._fan_outs.pop(fan_out.req_id, None)
            fan_out.announce()
