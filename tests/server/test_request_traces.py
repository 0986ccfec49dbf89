"""OpenTelemetry spans of requests, as a collector on a real socket receives them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra tracing")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.messages import EngineRequest
from penstock.errors import ConfigError
from penstock.scheduler.outputs import EngineCoreOutput
from penstock.server.options import ServerOptions
from penstock.server.tracing import check_packages
from support.fake_engine import FakeCore, write_model
from support.servers import Served, serving
from support.waiting import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# Kind of a span, of protobuf's enumeration.
SERVER = 2


class TimelyCore(FakeCore):
    """Core that begins requests as they arrive."""

    def _next(self, request: EngineRequest, tokens: list[int]) -> EngineCoreOutput:
        output = super()._next(request, tokens)
        return msgspec.structs.replace(output, first_scheduled_time=request.arrival_time)


class Collector:
    """Collector of OTLP over HTTP. requests: messages that it has got."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.requests.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def spans(self, number: int) -> list[Any]:
        """All spans so far, once there are as many."""
        wait_until(lambda: len(self._spans()) >= number, f"{number} spans")
        return self._spans()

    def _spans(self) -> list[Any]:
        messages = [ExportTraceServiceRequest.FromString(data) for data in self.requests]
        return [
            span
            for message in messages
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes_of(span: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(part) for part in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {attribute.key: value(attribute.value) for attribute in span.attributes}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Collector]]:
    collector = Collector()
    config = EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        engine = AsyncEngine.from_config(config, load_core=lambda config: TimelyCore())
        with serving(engine, otlp_traces_endpoint=collector.url) as server:
            yield server, collector
    collector.close()


@pytest.fixture
def server(served: tuple[Served, Collector]) -> Served:
    served[1].requests.clear()
    return served[0]


@pytest.fixture
def collector(served: tuple[Served, Collector]) -> Collector:
    return served[1]


def test_a_request_has_spans_of_its_phases_under_the_callers_span(server: Served, collector: Collector) -> None:
    body = {"model": "demo", "prompt": "the quick", "max_tokens": 5, "temperature": 0.5, "request_id": "mine"}
    server.post("/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
    spans = {span.name: span for span in collector.spans(4)}
    request = spans.pop("text_completion demo")
    assert request.kind == SERVER
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert set(spans) == {"queue", "prefill", "decode"}
    assert {(span.trace_id.hex(), span.parent_span_id) for span in spans.values()} == {(TRACE, request.span_id)}
    ends = [spans[name].end_time_unix_nano for name in ("queue", "prefill", "decode")]
    assert ends[:2] == [spans[name].start_time_unix_nano for name in ("prefill", "decode")]
    assert ends[2] == request.end_time_unix_nano
    assert request.start_time_unix_nano == spans["queue"].start_time_unix_nano
    found = attributes_of(request)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.model"] == "demo"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (5, 0.5)
    assert found["gen_ai.response.id"] == "cmpl-mine"
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.usage.input_tokens"] > 0
    assert not any(b"quick" in data for data in collector.requests)


def test_a_stream_that_its_client_leaves_is_traced_until_then(server: Served, collector: Collector) -> None:
    core = server.engine._dispatcher.core
    assert isinstance(core, FakeCore)
    core.on_step = lambda step: time.sleep(0.02)
    stream = server.client().completions.create(model="demo", prompt="a", max_tokens=60, stream=True)
    next(iter(stream))
    stream.close()
    spans = {span.name: span for span in collector.spans(4)}
    core.on_step = lambda step: None
    found = attributes_of(spans["text_completion demo"])
    assert found["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < found["gen_ai.usage.output_tokens"] < 60


def test_every_prompt_has_a_span_and_a_trace_that_is_not_sampled_has_none(server: Served, collector: Collector) -> None:
    server.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, traceparent=f"00-{TRACE}-{PARENT}-00")
    server.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2})
    spans = collector.spans(8)
    requests = [span for span in spans if span.name == "text_completion demo"]
    assert (len(spans), len(requests)) == (8, 2)
    assert not any(span.parent_span_id or span.trace_id.hex() == TRACE for span in requests)


def test_a_url_of_another_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint='grpc://localhost:4317' is not valid"):
        ServerOptions(served_model_name=("demo",), otlp_traces_endpoint="grpc://localhost:4317")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"penstock\[tracing\]"):
        check_packages()
