"""OpenTelemetry spans of requests: queue, prefill and decode under a span of the request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.contract import PoolingParams, SamplingParams
from penstock.engine.output.outputs import RequestMetrics, RequestOutput
from penstock.errors import ConfigError
from penstock.version import __version__

# Operations of the semantic conventions for generative AI, by route; other routes pool.
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
_POOLING = "embeddings"
# Parameters by the name of their attribute, where these are the same; others are left at their defaults.
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


class RequestTrace(Protocol):
    """Trace of one HTTP request, whose prompts have a span each."""

    def end(self, request_id: str, params: SamplingParams | PoolingParams, output: RequestOutput) -> None:
        """Record the spans of a prompt whose last output this is: the final one, or the last before its abort."""


class Tracing(Protocol):
    """Source of traces."""

    def begin(self, scope: Scope, model: str) -> RequestTrace:
        """Trace of an HTTP request. model: name that it asks for."""

    def close(self) -> None:
        """Send the spans that are left."""


class NoTracing:
    """Tracing that records nothing."""

    def begin(self, scope: Scope, model: str) -> RequestTrace:
        return self

    def end(self, request_id: str, params: SamplingParams | PoolingParams, output: RequestOutput) -> None: ...

    def close(self) -> None: ...


class OpenTelemetry:
    """Tracing with OpenTelemetry.

    Spans are made when a prompt has ended, from its metrics, so a running request costs nothing. The header traceparent
    of W3C gives the parent, and whether it is sampled. They have counts and parameters, and no texts.

    processor: gets the spans; see `otlp_tracing`.
    """

    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider

        # The variables of OpenTelemetry, such as OTEL_SERVICE_NAME, come first.
        defaults = Resource({SERVICE_NAME: "penstock", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=defaults.merge(_given_resource()))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("penstock", __version__)

    def begin(self, scope: Scope, model: str) -> RequestTrace:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = Headers(scope=scope)
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = TraceContextTextMapPropagator().extract(given)
        return _Trace(self._tracer, parent, _OPERATIONS.get(get_route_path(scope), _POOLING), model)

    def close(self) -> None:
        self._provider.shutdown()


class _Trace:
    def __init__(self, tracer: Any, parent: Any, operation: str, model: str) -> None:
        self._tracer = tracer
        self._parent = parent
        self._operation = operation
        self._model = model

    def end(self, request_id: str, params: SamplingParams | PoolingParams, output: RequestOutput) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        metrics = output.metrics
        ended = metrics.finished_time or time.monotonic()
        offset_ns = time.time_ns() - time.monotonic_ns()

        def unix_ns(monotonic_s: float) -> int:
            return int(monotonic_s * 1e9) + offset_ns

        span = self._tracer.start_span(
            f"{self._operation} {self._model}",
            context=self._parent,
            kind=SpanKind.SERVER,
            start_time=unix_ns(metrics.arrival_time),
            attributes={
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "penstock",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.response.id": request_id,
                **_parameters(params),
                **_results(output),
            },
        )
        if output.error is not None:
            span.set_status(Status(StatusCode.ERROR, output.error))
            span.set_attribute("error.type", "generation_failed")
        context = set_span_in_context(span)
        for name, start, end in _phases(metrics, ended):
            self._tracer.start_span(name, context=context, start_time=unix_ns(start)).end(unix_ns(end))
        span.end(unix_ns(ended))


def otlp_tracing(endpoint: str) -> OpenTelemetry:
    """Tracing that sends spans to a collector, in the background.

    endpoint: URL of OTLP over HTTP, such as http://localhost:4318/v1/traces.
    Raises ConfigError without the packages of the extra `tracing`.
    """
    check_packages()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return OpenTelemetry(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


def check_packages() -> None:
    """Raise ConfigError without the packages of the extra `tracing`."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs the package {error.name}. Install the extra: pip install 'penstock[tracing]'."
        ) from error


def _given_resource() -> Any:
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()


def _parameters(params: SamplingParams | PoolingParams) -> dict[str, Any]:
    if isinstance(params, PoolingParams):
        return {}
    found: dict[str, Any] = {f"gen_ai.request.{name}": getattr(params, name) for name in _PARAMETERS}
    if params.n != 1:
        found["gen_ai.request.choice.count"] = params.n
    if params.stop:
        found["gen_ai.request.stop_sequences"] = [params.stop] if isinstance(params.stop, str) else list(params.stop)
    return {name: value for name, value in found.items() if value is not None}


def _results(output: RequestOutput) -> Mapping[str, Any]:
    metrics = output.metrics
    # A request that was aborted has no reason in its last output.
    reasons = [completion.finish_reason or "abort" for completion in output.outputs]
    return {
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.output_tokens": metrics.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
        "penstock.num_preemptions": metrics.num_preemptions,
    }


def _phases(metrics: RequestMetrics, ended: float) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of the phases that a request has reached, the last one until its end."""
    begins = (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time)
    names = ("queue", "prefill", "decode")
    reached = [(name, begin) for name, begin in zip(names, begins, strict=True) if begin is not None]
    ends = [*(begin for _, begin in reached[1:]), ended]
    for (name, begin), end in zip(reached, ends, strict=True):
        yield name, begin, end
