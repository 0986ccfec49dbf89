"""Figures of features in the live view."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.engine.live.live_view import LiveFigure, sample_of
from penstock.engine.statistics.metric_totals import RequestTotals
from support.broker_statuses import BUSY


def figures(**values: float) -> dict[str, LiveFigure]:
    counters = {name: int(value) for name, value in values.items() if name != "kv_tier_folder_bytes"}
    gauges = {name: value for name, value in values.items() if name == "kv_tier_folder_bytes"}
    stats = replace(BUSY.stats, counters=counters, gauges=gauges)
    return {one.label: one for one in sample_of(RequestTotals(), replace(BUSY, stats=stats), 4).figures}


def test_a_feature_that_is_on_shows_shares_and_bytes() -> None:
    shown = figures(
        external_prefix_cache_queries=40,
        external_prefix_cache_hits=30,
        kv_host_queries=0,
        kv_host_hits=0,
        kv_folder_queries=40,
        kv_folder_hits=10,
        kv_peer_queries=40,
        kv_peer_hits=20,
        kv_host_loaded_bytes=0,
        kv_tier_loaded_bytes=1024,
        kv_tier_folder_bytes=2048.0,
    )
    assert shown == {
        "external hits": LiveFigure("external hits", 30, of=40),
        "folder hits": LiveFigure("folder hits", 10, of=40),
        "peer hits": LiveFigure("peer hits", 20, of=40),
        "from folder": LiveFigure("from folder", 1024, unit="bytes"),
        "folder": LiveFigure("folder", 2048.0, unit="bytes"),
    }


def test_a_feature_that_is_off_shows_nothing() -> None:
    assert figures() == {}
    assert sample_of(RequestTotals(), None, 4).figures == []
