"""Parallel sampling: several outputs of one prompt (`SamplingParams.n`)."""

from __future__ import annotations

import hashlib

import msgspec

from penstock.engine.messages import EngineRequest
from penstock.engine.output.outputs import RequestMetrics, RequestOutput
from penstock.engine.output.progress import Inbox, Progress, RequestProgress
from penstock.scheduler.acceptance import SpecDecodeMetrics


class FanOut:
    """Parent request of n samples, each of which is a request to the core.

    shares_prompt: whether the other samples wait for the first one's prompt blocks and share them.
    news: list to which this object is appended when samples have progressed since the last `announce`.
    """

    def __init__(self, request: EngineRequest, inbox: Inbox, news: list[FanOut], *, shares_prompt: bool) -> None:
        self.request = request
        self.inbox = inbox
        self.samples: list[RequestProgress] = []
        self._news = news
        self._has_news = False
        self._waits_for_prompt = shares_prompt

    @property
    def req_id(self) -> str:
        return self.request.req_id

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)

    @property
    def unread_bytes(self) -> int:
        """Estimated bytes of the output that was not taken."""
        return sum(sample.unread_bytes for sample in self.samples)

    @property
    def error(self) -> str | None:
        return next((sample.error for sample in self.samples if sample.error is not None), None)

    @property
    def awaits_check(self) -> bool:
        return any(sample.awaits_check for sample in self.samples)

    def check(self) -> None:
        for sample in self.samples:
            sample.check()

    def output(self) -> RequestOutput:
        """Snapshot of all samples so far."""
        return self._merged([sample.output() for sample in self.samples])

    def take_output(self) -> RequestOutput:
        """As `output`, with only the text and tokens since the last call."""
        return self._merged([sample.take_output() for sample in self.samples])

    def append(self, sample: Progress, /) -> None:
        """Note that a sample has progressed."""
        if not self._has_news:
            self._has_news = True
            self._news.append(self)

    def announce(self) -> None:
        """Notify the consumer, once for all samples that progressed."""
        self._has_news = False
        self.inbox.append(self)

    def first_requests(self) -> list[EngineRequest]:
        """Samples to submit to the core at once."""
        samples = self.samples[:1] if self._waits_for_prompt else self.samples
        return [sample.request for sample in samples]

    def next_requests(self) -> list[EngineRequest]:
        """Samples to submit now, once the first one has computed the prompt; else none."""
        first = self.samples[0]
        if not self._waits_for_prompt or not (first.token_ids or first.finished):
            return []
        self._waits_for_prompt = False
        return [sample.request for sample in self.samples[1:] if not sample.finished]

    def _merged(self, outputs: list[RequestOutput]) -> RequestOutput:
        merged = outputs[0]
        merged.request_id = self.req_id
        merged.outputs = [completion for output in outputs for completion in output.outputs]
        merged.finished = self.finished
        merged.metrics = merged_metrics([output.metrics for output in outputs])
        merged.error = self.error
        merged.is_invalid = any(output.is_invalid for output in outputs)
        return merged


def sample_requests(request: EngineRequest) -> list[EngineRequest]:
    """Create a core request per sample; the first has the seed of the parent request."""
    params = request.sampling_params
    assert params.seed is not None, "the front end sets a seed"
    return [
        msgspec.structs.replace(
            request,
            req_id=f"{request.req_id}#{index}",
            sampling_params=params.with_fields(
                n=1,
                seed=_sample_seed(params.seed, index),
                # Log-probabilities of the prompt are the same for all samples.
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
            # The first one is admitted, or refused, for all.
            is_admitted=request.is_admitted or index > 0,
            num_choices=max(params.n, request.num_choices) if index == 0 else 1,
        )
        for index in range(params.n)
    ]


def merged_metrics(metrics: list[RequestMetrics]) -> RequestMetrics:
    """Metrics of a request from those of its samples."""

    def known(name: str) -> list[float]:
        return [value for one in metrics if (value := getattr(one, name)) is not None]

    drafted = SpecDecodeMetrics()
    for one in metrics:
        drafted.add(one.spec_decode_metrics)
    is_finished = all(one.finished_time is not None for one in metrics)
    return RequestMetrics(
        arrival_time=metrics[0].arrival_time,
        first_scheduled_time=min(known("first_scheduled_time"), default=None),
        first_token_time=min(known("first_token_time"), default=None),
        last_token_time=max(known("last_token_time"), default=None),
        finished_time=max(known("finished_time")) if is_finished else None,
        num_preemptions=sum(one.num_preemptions for one in metrics),
        num_generated_tokens=sum(one.num_generated_tokens for one in metrics),
        num_cached_tokens=metrics[0].num_cached_tokens,
        num_outputs=sum(one.num_generated_tokens > 0 for one in metrics),
        decoding_s=sum(one.decoding_s for one in metrics),
        spec_decode_metrics=drafted,
    )


def _sample_seed(seed: int, index: int) -> int:
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/sample {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
