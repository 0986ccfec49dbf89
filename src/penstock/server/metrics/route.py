"""Route `/metrics`, in Prometheus' text format or OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from penstock.contract.feature import counters_of_features, gauges_of_features
from penstock.engine.statistics.metrics import PREFIX, Gauge, Histogram, Metric, Vector
from penstock.server.metrics.front_end_metrics import FrontEndMetrics
from penstock.server.metrics.table import NAMES_OF_VLLM, TABLE, Described

router = APIRouter()
_VLLM = "vllm"
# Label of every sample under vLLM's prefix. There each engine has a number; here one sample is of all cores.
_LABELS_OF_VLLM = {"engine": "0"}
_OPEN_METRICS = "application/openmetrics-text"
# Suffixes of the samples' names.
_SUFFIXES = {"counter": "_total", "info": "_info", "gauge": ""}


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    summary="Metrics of the server, of all its front ends together, for Prometheus",
)
async def metrics(http: Request) -> Response:
    await http.app.state.metrics.read_workers()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(http.app.state.metrics, http.app.state.served_model.options.metrics_prefix))
    accepted = [part.partition(";")[0].strip() for part in http.headers.get("Accept", "").split(",")]
    if _OPEN_METRICS in accepted:
        # All names are valid as they are; other ways of escaping would alter their colons.
        text = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return Response(text, headers={"Content-Type": f"{_OPEN_METRICS}; version=1.0.0; charset=utf-8"})
    return Response(generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


class _Collector(Collector):
    """Collector of a server's metrics. prefix: of their names, `ServerOptions.metrics_prefix`."""

    def __init__(self, metrics: FrontEndMetrics, prefix: str) -> None:
        self._metrics = metrics
        self._prefix = prefix

    def collect(self) -> Iterator[Family]:
        """Families of metrics; those of one name are one family, as the formats demand."""
        families: dict[str, Family] = {}
        more = _LABELS_OF_VLLM if self._prefix == _VLLM else {}
        collected = list(self._metrics.collect())
        for metric in collected:
            name = metric.name.removeprefix(PREFIX)
            described = TABLE.get(name) or _described_by_feature(name)
            for shown in (name, NAMES_OF_VLLM.get(name) if self._prefix == _VLLM else None):
                if shown is not None:
                    full_name = f"{self._prefix}:{shown}"
                    family = families.setdefault(full_name, Family(full_name, described.help, described.kind))
                    for suffix, labels, value in _samples(metric, _SUFFIXES.get(described.kind, "")):
                        family.add_sample(full_name + suffix, {**metric.labels, **more, **labels}, value)
        yield from families.values()
        if self._prefix == _VLLM:
            yield _cache_config(collected)


def _described_by_feature(name: str) -> Described:
    gauges = gauges_of_features()
    return Described("gauge", gauges[name]) if name in gauges else Described("counter", counters_of_features()[name])


def _cache_config(metrics: list[Metric]) -> Family:
    """vLLM's metric of the KV cache's sizes, which it has as labels."""
    sizes = {"kv_cache_block_size": "block_size", "num_kv_cache_blocks": "num_gpu_blocks"}
    family = Family("vllm:cache_config_info", "Sizes of the KV cache.", "gauge")
    labels = dict(_LABELS_OF_VLLM)
    for metric in metrics:
        if isinstance(metric, Gauge) and (name := sizes.get(metric.name.removeprefix(PREFIX))) is not None:
            labels |= {**metric.labels, name: str(int(metric.value))}
    family.add_sample(family.name, labels, 1.0)
    return family


def _samples(metric: Metric, suffix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Samples of a metric: what is appended to its name, further labels, and the value."""
    if isinstance(metric, Histogram):
        for bound, count in metric.buckets.items():
            yield "_bucket", {"le": bound}, count
        yield "_count", {}, metric.count
        yield "_sum", {}, metric.sum
    elif isinstance(metric, Vector):
        for position, value in enumerate(metric.values):
            yield suffix, {"position": str(position)}, value
    else:
        yield suffix, {}, metric.value
