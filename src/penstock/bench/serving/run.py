"""A server benchmark from its settings to its figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from penstock.bench.serving.api import RequestBodies, ServedModel, ServerUnreachable, backend_named, first_model
from penstock.bench.serving.datasets import sample
from penstock.bench.serving.http import Clock, HttpClient, fetch, raise_descriptor_limit
from penstock.bench.serving.load import PreparedRequest, run_load, send
from penstock.bench.serving.outcome import Outcome, Status
from penstock.bench.serving.results import METRICS, details, summarize
from penstock.bench.serving.settings import DatasetSettings, LoadSettings
from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_RETRY_INTERVAL_S = 1.0


class Progress(Protocol):
    """Bar of finished requests."""

    def update(self) -> object: ...


@dataclass(frozen=True)
class ServeSettings:
    """Settings of a benchmark.

    model: name or folder; None asks the server. served_model_name: name in requests, if it is another one.
    tokenizer: folder or hub id, if it is not the model's. endpoint: path; None for the backend's. extra_body: fields of
    every request. request_id_prefix: begin of the header X-Request-Id; None sends none. num_warmups: requests before
    the measured ones. ready_check_timeout_s: time in which the server must complete a request; 0 asks for none.
    profile: the server traces the measured requests. goodput: targets in ms.
    """

    base_url: str
    dataset: DatasetSettings
    load: LoadSettings
    backend: str = "openai"
    endpoint: str | None = None
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    verify: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    request_id_prefix: str | None = None
    num_warmups: int = 0
    ready_check_timeout_s: float = 0.0
    profile: bool = False
    percentile_metrics: Sequence[str] = ("ttft", "tpot", "itl")
    metric_percentiles: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        backend_named(self.backend)
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups {self.num_warmups} is not valid. Allowed: 0 or more.")
        if self.ready_check_timeout_s < 0:
            raise ConfigError(
                f"--ready-check-timeout-sec {self.ready_check_timeout_s:g} is not valid. Allowed: 0 or more."
            )
        for metric in self.percentile_metrics:
            if metric not in METRICS:
                raise ConfigError(f"--percentile-metrics {metric} is not valid. Allowed: {', '.join(METRICS)}.")
        for percent in self.metric_percentiles:
            if not 0 <= percent <= 100:
                raise ConfigError(f"--metric-percentiles {percent:g} is not valid. Allowed: 0 to 100.")


@dataclass(frozen=True)
class ServeResult:
    """Results of a benchmark. model: that was measured. figures: of all requests."""

    model: ServedModel
    tokenizer: str
    figures: dict[str, Any]
    outcomes: list[Outcome]

    def as_json(self, settings: ServeSettings, *, is_detailed: bool) -> dict[str, Any]:
        """Settings and figures, under vLLM's names. is_detailed: with the values of each request."""
        return {
            "backend": settings.backend,
            "endpoint_type": settings.backend,
            "model_id": self.model.id,
            "tokenizer_id": self.tokenizer,
            "num_prompts": settings.dataset.num_prompts,
            # JSON has no infinity.
            "request_rate": settings.load.request_rate if settings.load.request_rate < float("inf") else "inf",
            "burstiness": settings.load.burstiness,
            "max_concurrency": settings.load.max_concurrency,
            **{name: value for name, value in vars(settings.load).items() if name.startswith("ramp_up_") and value},
            **self.figures,
            **(details(self.outcomes) if is_detailed else {}),
        }


async def run(
    settings: ServeSettings, make_bar: Callable[[int], Progress], clock: Clock = time.perf_counter
) -> ServeResult:
    """Measure a server. make_bar: makes a progress bar of so many requests.

    Failed requests are in the results. Raises ConfigError, ServerUnreachable if the server must be asked for its model
    or is not ready in time, and the errors of the tokenizer.
    """
    raise_descriptor_limit()
    deadline = clock() + settings.ready_check_timeout_s
    client = HttpClient(settings.base_url, settings.headers, clock, verify=settings.verify)
    try:
        model = await _until(deadline, clock, partial(_model, settings, client))
        tokenizer = settings.tokenizer or model.root
        requests = _prepare(settings, client, model, tokenizer)
        measured, warmups = requests[: settings.dataset.num_prompts], requests[settings.dataset.num_prompts :]
        if settings.ready_check_timeout_s:
            await _until(deadline, clock, partial(_check_ready, client, measured[0], clock, deadline))
        if warmups:
            await run_load(client, warmups, [0.0] * len(warmups), settings.load, clock, lambda: None)
        arrivals = settings.load.arrivals(len(measured))
        async with _traced(client) if settings.profile else nullcontext():
            outcomes = await run_load(client, measured, arrivals, settings.load, clock, make_bar(len(measured)).update)
    finally:
        client.close()
    figures = summarize(
        outcomes,
        percentile_metrics=settings.percentile_metrics,
        metric_percentiles=settings.metric_percentiles,
        goodput=settings.goodput,
    )
    return ServeResult(model, tokenizer, figures, outcomes)


async def _until(deadline: float, clock: Clock, attempt: Callable[[], Awaitable[_T]]) -> _T:
    """Result of the first attempt that reaches the server. Raises ServerUnreachable after the deadline."""
    while True:
        try:
            return await attempt()
        except ServerUnreachable:
            if clock() >= deadline:
                raise
        await asyncio.sleep(_RETRY_INTERVAL_S)


async def _check_ready(client: HttpClient, request: PreparedRequest, clock: Clock, deadline: float) -> None:
    outcome = await send(client, replace(request, leave_after=None), clock, max(deadline - clock(), _RETRY_INTERVAL_S))
    if outcome.status is not Status.COMPLETED:
        raise ServerUnreachable(
            "No request was completed within --ready-check-timeout-sec. The last one failed because of "
            f"{outcome.cause}: {outcome.error}"
        )


@asynccontextmanager
async def _traced(client: HttpClient) -> AsyncIterator[None]:
    """Context of measured requests, which the server profiles. Raises ConfigError if it does not."""
    await _post(client, "/start_profile")
    try:
        yield
    finally:
        await _post(client, "/stop_profile")


async def _post(client: HttpClient, path: str) -> None:
    response = await fetch(client, "POST", path)
    if response.status != 200:
        raise ConfigError(
            f"--profile: {path} of the server answers with HTTP {response.status} "
            f"({response.body[:200].decode(errors='replace')}). Start the server with --profiler-dir, penstock serve "
            "with --enable-admin too, whose key --header x-api-key=KEY sends; or leave --profile out."
        )


async def _model(settings: ServeSettings, client: HttpClient) -> ServedModel:
    if settings.model is None:
        found = await first_model(client)
        return ServedModel(settings.served_model_name or found.id, found.root)
    return ServedModel(settings.served_model_name or settings.model, settings.model)


def _prepare(settings: ServeSettings, client: HttpClient, model: ServedModel, tokenizer: str) -> list[PreparedRequest]:
    """Requests with all of their bytes, so that nothing is encoded under load; those of the warm-up come last."""
    backend = backend_named(settings.backend)

    @cache
    def load() -> Tokenizer:
        return _load_tokenizer(tokenizer)

    samples = sample(settings.dataset, load, settings.num_warmups)
    bodies = RequestBodies(backend, model.id, settings.extra_body, load, settings.dataset.seed)
    path = settings.endpoint or backend.endpoint
    leave_after = settings.load.leave_after([request.output_len for request in samples[: settings.dataset.num_prompts]])
    prepared = []
    prefix = settings.request_id_prefix
    for index, (request, leaves) in enumerate(
        zip(samples, [*leave_after, *[None] * settings.num_warmups], strict=True)
    ):
        body, prompt_len = bodies.make(request)
        headers = {} if prefix is None else {"X-Request-Id": f"{prefix}{index}"}
        prepared.append(PreparedRequest(client.message("POST", path, body, headers), prompt_len, leaves))
    return prepared


def _load_tokenizer(name: str) -> Tokenizer:
    """Raises ConfigError if there is no such tokenizer here."""
    from penstock.checkpoints.resolve import resolve_metadata_folder
    from penstock.errors import ModelNotFound
    from penstock.text.tokenizer import load_tokenizer

    try:
        return load_tokenizer(resolve_metadata_folder(name)[0])
    except ModelNotFound as error:
        raise ConfigError(
            f"Prompts of this dataset need the model's tokenizer, and {error} "
            "Give its folder with --tokenizer, or use --dataset-name custom."
        ) from error
