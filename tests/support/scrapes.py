"""Scrapes of `/metrics`, read with Prometheus' own parsers."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


class Scrape:
    """Samples of one answer. kinds: kind of each family."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in families:
            self.kinds[family.name] = family.type
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.samples
                self.samples[key] = sample.value

    def __getitem__(self, name: str) -> float:
        return self.get(name)

    def get(self, name: str, **labels: str) -> float:
        """Value of the one sample with this name, without the prefix, and with these labels among others."""
        found = [
            value
            for (full_name, has), value in self.samples.items()
            if full_name == f"penstock:{name}" and labels.items() <= dict(has).items()
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def counters(self) -> dict[Any, float]:
        """Values that never decrease: counters, and counts, buckets and sums of histograms."""
        ends = ("_total", "_count", "_bucket", "_sum")
        return {key: value for key, value in self.samples.items() if key[0].endswith(ends)}


def read_text(text: str) -> Scrape:
    return Scrape(parse_text(text))  # type: ignore[no-untyped-call]


def read_open_metrics(text: str) -> Scrape:
    return Scrape(parse_open_metrics(text))  # type: ignore[no-untyped-call]


def scrape(url: str, accept: str = "", timeout_s: float = 60.0) -> Scrape:
    """Scrape a server over a connection of its own."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        text = response.read().decode()
    return read_open_metrics(text) if accept == OPEN_METRICS else read_text(text)
