"""Metrics of an engine: their names and values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, AsyncEngine, SamplingParams
from penstock.engine.metrics import Counter, EngineMetrics, Gauge, Histogram, Metric, Vector
from penstock.engine.outputs import RequestMetrics
from penstock.errors import LifecycleError
from penstock.scheduler.acceptance import SpecDecodeMetrics
from penstock.scheduler.outputs import FinishReason, SchedulerStats

SMALL = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 1 << 24}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
IDLE = SchedulerStats(num_running_reqs=0, num_waiting_reqs=0, num_blocks=10, num_used_blocks=0)
PROMPT = list(range(20, 60))


def values(metrics: list[Metric]) -> dict[str, Any]:
    """Values by name; `request_success` also by its reason."""
    found: dict[str, Any] = {}
    for metric in metrics:
        name = metric.name.removeprefix("penstock:")
        assert name != metric.name
        if isinstance(metric, Histogram):
            found[name] = metric.count
        elif isinstance(metric, Vector):
            found[name] = metric.values
        else:
            found[name + metric.labels.get("finished_reason", "")] = metric.value
    return found


def ended(**fields: Any) -> RequestMetrics:
    return RequestMetrics(arrival_time=10.0, **fields)


def test_ends_are_counted_by_reason() -> None:
    metrics = EngineMetrics("demo", has_prefix_cache=True)
    for reason in (FinishReason.STOP, FinishReason.STOP, FinishReason.ABORT):
        metrics.note_end(reason, 5, ended(first_scheduled_time=11.0, num_generated_tokens=3, num_cached_tokens=4))
    found = values(metrics.read(IDLE, []))
    reasons = {reason: found[f"request_success{reason}"] for reason in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 2, "length": 0, "abort": 1, "error": 0}
    assert (found["prompt_tokens"], found["generation_tokens"]) == (15, 9)
    assert (found["prefix_cache_queries"], found["prefix_cache_hits"]) == (15, 12)


def test_running_requests_are_counted_with_what_they_have() -> None:
    metrics = EngineMetrics("demo", has_prefix_cache=False)
    drafts = SpecDecodeMetrics()
    drafts.note(3, 2)
    started = ended(first_scheduled_time=11.0, num_generated_tokens=3, num_preemptions=2, spec_decode_metrics=drafts)
    running = [(5, started), (7, ended())]
    for _ in range(2):
        found = values(metrics.read(IDLE, running))
        assert (found["prompt_tokens"], found["generation_tokens"], found["num_preemptions"]) == (5, 3, 2)
        assert found["prefix_cache_queries"] == 0
        assert found["spec_decode_num_drafts"] == 1
        assert (found["spec_decode_num_draft_tokens"], found["spec_decode_num_accepted_tokens"]) == (3, 2)
        assert found["spec_decode_num_accepted_tokens_per_pos"] == [1, 1, 0]


def test_gauges_are_those_of_the_scheduler() -> None:
    stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, num_blocks=10, num_used_blocks=4)
    metrics = EngineMetrics("demo", has_prefix_cache=True).read(stats, [])
    gauges = {metric.name: metric.value for metric in metrics if isinstance(metric, Gauge)}
    assert gauges == {
        "penstock:num_requests_running": 3.0,
        "penstock:num_requests_waiting": 2.0,
        "penstock:kv_cache_usage_perc": 0.4,
    }
    assert {metric.labels["model_name"] for metric in metrics} == {"demo"}


def test_times_of_requests_fall_into_buckets() -> None:
    metrics = EngineMetrics("demo", has_prefix_cache=True)
    for first_token_time in (10.05, 10.05, 11.5, 10000.0):
        metrics.note_end(FinishReason.STOP, 5, ended(first_token_time=first_token_time))
    metrics.note_end(FinishReason.ABORT, 5, ended())
    found = {metric.name: metric for metric in metrics.read(IDLE, [])}
    histogram = found["penstock:time_to_first_token_seconds"]
    assert isinstance(histogram, Histogram)
    assert histogram.count == 4
    assert histogram.sum == pytest.approx(0.05 + 0.05 + 1.5 + 9990.0)
    of_bounds = {bound: histogram.buckets[bound] for bound in ("0.02", "0.1", "1.0", "2.0", "500.0", "+Inf")}
    assert of_bounds == {"0.02": 0, "0.1": 2, "1.0": 2, "2.0": 3, "500.0": 3, "+Inf": 4}
    assert isinstance(found["penstock:prompt_tokens"], Counter)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SMALL) as llm:
        yield llm


def test_an_engine_counts_what_it_has_done(llm: LLM) -> None:
    before = values(llm.get_metrics())
    llm.generate([{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:3]}], GREEDY)
    llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    after = values(llm.get_metrics())
    new = {name: after[name] - before[name] for name, value in after.items() if not isinstance(value, list)}
    assert new["prompt_tokens"] == new["prefix_cache_queries"] == 2 * len(PROMPT) + 3
    assert new["generation_tokens"] == 12
    assert 0 < new["prefix_cache_hits"] < len(PROMPT)
    assert (new["request_successlength"], new["time_to_first_token_seconds"]) == (3, 3)
    assert new["e2e_request_latency_seconds"] == new["request_queue_time_seconds"] == 3
    assert (after["num_requests_running"], after["kv_cache_usage_perc"]) == (0, 0)


def test_a_request_on_its_way_is_seen(llm: LLM) -> None:
    before = values(llm.get_metrics())
    session = llm._session
    steps = session.run([session.accept({"prompt_token_ids": PROMPT}, GREEDY)])
    next(steps)
    now = values(llm.get_metrics())
    assert now["num_requests_running"] == 1
    assert now["kv_cache_usage_perc"] > 0
    assert now["prompt_tokens"] - before["prompt_tokens"] == len(PROMPT)
    assert now["generation_tokens"] - before["generation_tokens"] >= 1
    steps.close()
    after = values(llm.get_metrics())
    assert (after["num_requests_running"], after["kv_cache_usage_perc"]) == (0, 0)
    assert after["request_successabort"] - before["request_successabort"] == 1


def test_a_closed_engine_has_no_metrics() -> None:
    llm = LLM("demo", **SMALL)
    llm.close()
    with pytest.raises(LifecycleError):
        llm.get_metrics()


def test_an_asynchronous_engine_has_metrics_of_its_core() -> None:
    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        async with AsyncEngine("demo", enable_multiprocessing=False, **SMALL) as engine:
            outputs = engine.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=500, ignore_eos=True))
            async for _ in outputs:
                running = values(await engine.get_metrics())
                break
            await outputs.aclose()
            return running, values(await engine.get_metrics())

    running, after = asyncio.run(main())
    assert running["num_requests_running"] == 1
    assert running["kv_cache_usage_perc"] > 0
    assert after["request_successabort"] == 1
    assert after["num_requests_running"] == 0
