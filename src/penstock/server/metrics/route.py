"""Route `/metrics`, in Prometheus' text format or OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from starlette.responses import Response

from penstock.engine.metrics import PREFIX, Histogram, Metric, Vector
from penstock.server.metrics.front_end_metrics import FrontEndMetrics
from penstock.server.metrics.table import TABLE

router = APIRouter()
# What the formats append to a metric's name.
_SUFFIXES = {"counter": "_total", "info": "_info", "gauge": ""}


@router.get("/metrics", summary="Metrics of the server, of all its front ends together, for Prometheus")
async def metrics(http: Request) -> Response:
    encode, content_type = choose_encoder(http.headers.get("Accept", ""))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(http.app.state.metrics))
    return Response(encode(registry), headers={"Content-Type": content_type})


class _Collector(Collector):
    def __init__(self, metrics: FrontEndMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        """Families of metrics; those of one name are one family, as the formats demand."""
        families: dict[str, Family] = {}
        for metric in self._metrics.collect():
            described = TABLE[metric.name.removeprefix(PREFIX)]
            family = families.setdefault(metric.name, Family(metric.name, described.help, described.kind))
            for suffix, labels, value in _samples(metric, _SUFFIXES.get(described.kind, "")):
                family.add_sample(metric.name + suffix, {**metric.labels, **labels}, value)
        yield from families.values()


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
