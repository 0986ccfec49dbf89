"""Sums of the metrics of front ends that share a folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from penstock.engine.output.outputs import RequestMetrics
from penstock.engine.processes.broker_connection import BrokerState
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.engine.statistics.metrics import Gauge, Histogram, Metric, Vector
from penstock.scheduler.outputs import FinishReason
from penstock.server.metrics.expert_tokens import NoExpertTokens
from penstock.server.metrics.front_end_metrics import FrontEndMetrics
from penstock.server.metrics.http_requests import HttpCounts
from penstock.server.metrics.launcher_metrics import LauncherMetrics
from penstock.server.metrics.route import _Collector
from penstock.server.metrics.table import NAMES_OF_VLLM, TABLE
from penstock.server.processes.health import Health
from support.broker_statuses import BUSY
from support.expert_tokens import Workers, expert_tokens


class FrontEnd:
    """Front end with requests that are noted by hand."""

    def __init__(
        self,
        folder: Path,
        number: int,
        broker: BrokerState | None = None,
        experts: NoExpertTokens | None = None,
    ) -> None:
        self.totals = RequestTotals()
        self.http = HttpCounts()
        health = Health(broker or BrokerState(), step_limit_s=60.0, silence_limit_s=60.0)
        self.metrics = FrontEndMetrics(
            cast(Any, self),
            health,
            self.http,
            folder,
            number=number,
            model_name="demo",
            max_num_seqs=4,
            block_size=16,
            experts=experts,
        )

    def request_totals(self) -> RequestTotals:
        copy = RequestTotals()
        copy.add(self.totals)
        return copy

    def note(self, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        """Note a request of ten prompt tokens that has ended, and its HTTP request."""
        metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=2.0, num_generated_tokens=num_tokens)
        self.totals.note_counts(10, metrics, has_prefix_cache=True)
        self.totals.note_end(reason, 10, metrics)
        self.http.note("/v1/completions", "POST", 200)

    def read(self) -> dict[str, Any]:
        """Values by name and differing labels."""
        return {name_of(metric): value_of(metric) for metric in self.metrics.collect()}


def name_of(metric: Metric) -> str:
    labels = [value for key, value in metric.labels.items() if key != "model_name"]
    return " ".join([metric.name.removeprefix("penstock:"), *labels])


def value_of(metric: Metric) -> Any:
    if isinstance(metric, Histogram):
        return metric.count
    return metric.values if isinstance(metric, Vector) else metric.value


@pytest.fixture
def front(tmp_path: Path) -> Callable[..., FrontEnd]:
    return lambda number, broker=None, experts=None: FrontEnd(tmp_path, number, broker, experts)


def test_any_front_end_gives_the_sums_of_all(front: Callable[..., FrontEnd]) -> None:
    one, other, third = front(0), front(1), front(10)
    one.note(3)
    other.note(4)
    other.note(5, FinishReason.ABORT)
    third.http.note("none", "GET", 404)
    for each in (one, other, third):
        each.metrics.write()
    for each in (one, other, third):
        found = each.read()
        assert (found["generation_tokens"], found["prompt_tokens"]) == (12, 30)
        assert (found["request_success stop"], found["request_success abort"]) == (2, 1)
        assert found["request_generation_tokens"] == 3
        assert (found["http_requests /v1/completions POST 200"], found["http_requests none GET 404"]) == (3, 1)


def test_a_front_end_that_has_ended_still_counts(front: Callable[..., FrontEnd]) -> None:
    first, other = front(0), front(1)
    first.note(3)
    first.metrics.write()
    del first
    assert other.read()["generation_tokens"] == 3
    assert front(2).read()["generation_tokens"] == 3


def test_what_a_front_end_has_shown_is_not_lost_with_it(front: Callable[..., FrontEnd]) -> None:
    first, other = front(0), front(1)
    first.note(3)
    shown = first.read()["generation_tokens"]
    del first
    assert other.read()["generation_tokens"] == shown == 3


def test_reading_changes_nothing(front: Callable[..., FrontEnd]) -> None:
    one, other = front(0), front(1)
    one.note(3)
    other.note(4)
    other.metrics.write()
    assert [one.read()["generation_tokens"] for _ in range(3)] == [7, 7, 7]


def test_gauges_are_those_of_the_broker_and_not_summed(front: Callable[..., FrontEnd]) -> None:
    broker = BrokerState()
    broker.note(BUSY)
    one, other = front(0, broker), front(1, broker)
    other.metrics.write()
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "num_requests": 7,
        "num_queued_requests": 1,
        "num_queued_tokens": 90,
        "max_num_requests_running": 8,
        "kv_cache_usage_perc": 0.4,
        "num_kv_cache_blocks": 10,
        "num_cores": 2,
        "num_cores_recovering": 1,
        "core_stalled_seconds": 0.5,
        "alive": 1,
        "ready": 1,
    }
    found = one.read()
    assert {name: found[name] for name in expected} == expected
    assert 0 <= found["broker_heartbeat_age_seconds"] < 60


def test_before_the_first_heartbeat_there_are_no_numbers_of_the_broker(front: Callable[..., FrontEnd]) -> None:
    found = front(0).read()
    assert "num_requests_running" not in found
    assert (found["alive"], found["ready"]) == (1, 0)


def test_a_broker_that_is_silent_for_too_long_is_seen(front: Callable[..., FrontEnd]) -> None:
    broker = BrokerState()
    broker.note(BUSY)
    broker.received_at -= 100.0
    found = front(0, broker).read()
    assert (found["alive"], found["ready"]) == (0, 0)
    assert found["broker_heartbeat_age_seconds"] >= 100
    assert found["num_requests_running"] == 3


def test_a_front_end_whose_folder_is_gone_gives_its_own_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lonely = FrontEnd(tmp_path / "gone", 0)
    lonely.note(3)
    with caplog.at_level(logging.WARNING):
        assert [lonely.read()["generation_tokens"] for _ in range(2)] == [3, 3]
    assert len([record for record in caplog.records if "Metrics cannot be shared" in record.getMessage()]) == 1


def test_every_metric_is_described_and_every_description_is_of_a_metric(
    front: Callable[..., FrontEnd], tmp_path: Path
) -> None:
    broker = BrokerState()
    broker.note(BUSY)
    LauncherMetrics(tmp_path, 1)
    experts = expert_tokens(Workers({0: [1, 2]}))
    asyncio.run(experts.read())
    one = front(0, broker, experts)
    one.note(3)
    one.totals.drafts.note(3, 1)
    kinds = {metric.name.removeprefix("penstock:"): kind_of(metric) for metric in one.metrics.collect()}
    assert kinds == {name: described.kind for name, described in TABLE.items()}


def test_counts_and_values_of_features_are_described_by_them(front: Callable[..., FrontEnd]) -> None:
    broker = BrokerState()
    counters, gauges = {"kv_tier_loaded_bytes": 5}, {"kv_tier_folder_bytes": 7.0}
    broker.note(replace(BUSY, stats=replace(BUSY.stats, counters=counters, gauges=gauges)))
    families = {family.name: family for family in _Collector(front(0, broker).metrics, "penstock").collect()}
    loaded, in_folder = (families[f"penstock:kv_tier_{name}_bytes"] for name in ("loaded", "folder"))
    assert [(sample.name, sample.value) for sample in loaded.samples] == [("penstock:kv_tier_loaded_bytes_total", 5)]
    assert [(sample.name, sample.value) for sample in in_folder.samples] == [("penstock:kv_tier_folder_bytes", 7)]
    assert (loaded.type, in_folder.type) == ("counter", "gauge")
    assert "kv_offload_dir" in in_folder.documentation


# Samples that public dashboards of vLLM's ask for.
ON_DASHBOARDS = {
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total"),
    *("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "gpu_prefix_cache_hits_total", "cache_config_info"),
    *("e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_count", "e2e_request_latency_seconds_sum"),
    *("time_to_first_token_seconds_bucket", "time_per_output_token_seconds_bucket", "inter_token_latency_seconds_sum"),
    *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_inference_time_seconds_sum"),
    *("request_max_num_generation_tokens_sum", "request_params_max_tokens_sum"),
}


def test_names_can_be_those_of_vllm(front: Callable[..., FrontEnd]) -> None:
    broker = BrokerState()
    broker.note(BUSY)
    one = front(0, broker)
    one.totals.note_end(FinishReason.LENGTH, 10, RequestMetrics(arrival_time=1.0, first_scheduled_time=2.0), 7)
    own, other, vllm = (
        {family.name: family for family in _Collector(one.metrics, prefix).collect()}
        for prefix in ("penstock", "mine", "vllm")
    )
    assert {name.partition(":")[2] for name in own} == {name.partition(":")[2] for name in other}
    assert {name.partition(":")[0] for name in vllm} == {"vllm"}
    added = {name.removeprefix("vllm:") for name in vllm} - {name.removeprefix("penstock:") for name in own}
    assert added == {"cache_config_info", *NAMES_OF_VLLM.values()}
    for name, old in NAMES_OF_VLLM.items():
        before, after = ([sample.value for sample in vllm[f"vllm:{one}"].samples] for one in (name, old))
        assert before == after
    (sample,) = vllm["vllm:cache_config_info"].samples
    sizes = {"block_size": "16", "num_gpu_blocks": str(BUSY.stats.num_blocks)}
    assert sample.labels == {"model_name": "demo", "engine": "0", **sizes}
    samples = [sample for family in vllm.values() for sample in family.samples]
    assert all(sample.labels["engine"] == "0" and sample.labels["model_name"] == "demo" for sample in samples)
    assert {sample.name.removeprefix("vllm:") for sample in samples} >= ON_DASHBOARDS
    assert not any("engine" in sample.labels for family in own.values() for sample in family.samples)
    assert {"vllm:request_params_max_tokens_sum": 7.0}.items() <= {
        sample.name: sample.value for sample in vllm["vllm:request_params_max_tokens"].samples
    }.items()


def kind_of(metric: Metric) -> str:
    if metric.name == "penstock:build":
        return "info"
    if isinstance(metric, Gauge):
        return "gauge"
    return "histogram" if isinstance(metric, Histogram) else "counter"
