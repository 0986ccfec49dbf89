"""Metrics of an engine: their names and values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import LLM, AsyncEngine, SamplingParams
from penstock.contract.feature import with_label
from penstock.engine.output.outputs import RequestMetrics
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.engine.statistics.metrics import Counter, EngineMetrics, Gauge, Histogram, Metric, Vector, metrics_of
from penstock.errors import ContextTooLong, EngineDead, LifecycleError, Overloaded, PenstockError
from penstock.scheduler.acceptance import SpecDecodeMetrics
from penstock.scheduler.outputs import FinishReason, SchedulerStats, summed_stats

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
    stats = SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=2,
        num_blocks=10,
        num_used_blocks=4,
        num_states=8,
        num_used_states=6,
        num_snapshots=2,
        num_snapshots_taken=9,
        num_snapshots_evicted=7,
        num_encoder_tokens=100,
        num_used_encoder_tokens=20,
        num_cached_encoder_tokens=30,
        num_encoder_queries=5,
        num_encoder_hits=4,
        weight_version=3,
    )
    metrics = EngineMetrics("demo", has_prefix_cache=True).read(stats, [])
    gauges = {metric.name: metric.value for metric in metrics if isinstance(metric, Gauge)}
    assert gauges == {
        "penstock:num_requests_running": 3.0,
        "penstock:num_requests_waiting": 2.0,
        # Of states, of which more are held than of blocks.
        "penstock:kv_cache_usage_perc": 0.75,
        "penstock:num_states": 8.0,
        "penstock:num_state_snapshots": 2.0,
        "penstock:encoder_cache_usage_perc": 0.5,
        "penstock:num_encoder_cache_tokens": 100.0,
        "penstock:weight_version": 3.0,
    }
    counters = {metric.name: metric.value for metric in metrics if isinstance(metric, Counter)}
    assert counters["penstock:state_snapshots_taken"] == 9
    assert counters["penstock:state_snapshots_evicted"] == 7
    assert counters["penstock:encoder_cache_queries"] == 5
    assert counters["penstock:encoder_cache_hits"] == 4
    assert {metric.labels["model_name"] for metric in metrics} == {"demo"}


def test_counts_and_values_of_features_are_summed_over_cores_and_may_have_a_label() -> None:
    def core(loaded: int, in_use: float) -> SchedulerStats:
        counters = {with_label("kv_bytes", "tier", "folder"): loaded, with_label("kv_bytes", "tier", "host"): 1}
        return msgspec.structs.replace(IDLE, counters={**counters, "hits": 2}, gauges={"in_use_bytes": in_use})

    stats = summed_stats([core(3, 0.5), core(4, 1.0)])
    assert msgspec.json.decode(msgspec.json.encode(stats), type=SchedulerStats) == stats
    metrics = EngineMetrics("demo", has_prefix_cache=True).read(stats, [])
    found = {(one.name, one.labels.get("tier")): one.value for one in metrics if isinstance(one, Counter | Gauge)}
    assert found["penstock:kv_bytes", "folder"] == 7
    assert found["penstock:kv_bytes", "host"] == 2
    assert found["penstock:hits", None] == 4
    assert found["penstock:in_use_bytes", None] == 1.5


def test_times_of_requests_fall_into_buckets() -> None:
    metrics = EngineMetrics("demo", has_prefix_cache=True)
    for first_scheduled_time in (10.05, 10.05, 11.5, 10000.0):
        metrics.note_end(FinishReason.STOP, 5, ended(first_scheduled_time=first_scheduled_time))
    metrics.note_end(FinishReason.ABORT, 5, ended())
    histogram = histograms(metrics)["request_queue_time_seconds"]
    assert histogram.count == 4
    assert histogram.sum == pytest.approx(0.05 + 0.05 + 1.5 + 9990.0)
    of_bounds = {bound: histogram.buckets[bound] for bound in ("0.02", "0.1", "1.0", "2.0", "500.0", "+Inf")}
    assert of_bounds == {"0.02": 0, "0.1": 2, "1.0": 2, "2.0": 3, "500.0": 3, "+Inf": 4}


def test_a_request_is_split_into_its_phases() -> None:
    metrics = EngineMetrics("demo", has_prefix_cache=True)
    whole = ended(
        first_scheduled_time=11.0,
        first_token_time=13.0,
        last_token_time=17.0,
        finished_time=18.0,
        decoding_s=4.0,
        num_generated_tokens=9,
    )
    metrics.note_end(FinishReason.LENGTH, 700, whole)
    sums = {name: histogram.sum for name, histogram in histograms(metrics).items() if histogram.count}
    assert sums == {
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 6.0,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 8.0,
        "request_prompt_tokens": 700.0,
        "request_generation_tokens": 9.0,
    }


def test_a_request_that_never_ran_has_no_tokens_in_the_histograms() -> None:
    metrics = EngineMetrics("demo", has_prefix_cache=True)
    metrics.note_end(FinishReason.ABORT, 700, ended(finished_time=12.0))
    counts = {name: histogram.count for name, histogram in histograms(metrics).items() if histogram.count}
    assert counts == {"e2e_request_latency_seconds": 1}


def test_tokens_that_arrive_together_have_no_time_between_them() -> None:
    metrics = EngineMetrics("demo", has_prefix_cache=True)
    metrics.note_first_token(12.0, 10.0)
    metrics.note_later_tokens({}, 1, 12.0)
    # Three requests: one more had its last token at the same time, and one earlier.
    metrics.note_later_tokens({12.0: 2, 11.75: 1}, 2, 12.5)
    found = histograms(metrics)
    assert (found["time_to_first_token_seconds"].count, found["time_to_first_token_seconds"].sum) == (1, 2.0)
    gaps = found["inter_token_latency_seconds"]
    assert (gaps.count, gaps.sum) == (6, 1.75)
    assert (gaps.buckets["0.0005"], gaps.buckets["0.3"], gaps.buckets["0.5"]) == (3, 3, 5)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("9 requests are queued.", retry_after_s=1.0), "queue_full"),
        (ContextTooLong("The prompt has 9 tokens."), "invalid"),
        (EngineDead("The core was lost."), "error"),
    ],
)
def test_refused_requests_are_no_aborted_ones(error: PenstockError, reason: str) -> None:
    metrics = EngineMetrics("demo", has_prefix_cache=True)
    metrics.note_refusal(error)
    totals = metrics.totals([])
    assert totals.num_refused == {"queue_full": 0, "invalid": 0, "error": 0, reason: 1}
    assert set(totals.num_ended.values()) == {0}


class Event(NamedTuple):
    """A request that makes tokens and ends. gaps: seconds before each step's tokens; sizes: their numbers."""

    gaps: list[float]
    sizes: list[int]
    reason: FinishReason
    num_prompt_tokens: int
    drafts: list[tuple[int, int]]


_events = st.builds(
    Event,
    st.lists(st.floats(0.0, 1000.0, width=16), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.sampled_from(list(FinishReason)),
    st.integers(1, 10**7),
    st.lists(st.tuples(st.integers(3, 6), st.integers(0, 3)), max_size=3),
)


def note(metrics: EngineMetrics, event: Event) -> None:
    now = 10.0
    last: float | None = None
    for gap, size in zip(event.gaps, event.sizes, strict=False):
        now += gap
        if last is None:
            metrics.note_first_token(now, 10.0)
        metrics.note_later_tokens({} if last is None else {last: 1}, size - 1, now)
        last = now
    drafts = SpecDecodeMetrics()
    for num_drafts, num_accepted in event.drafts:
        drafts.note(num_drafts, num_accepted)
    num_tokens = sum(event.sizes[: len(event.gaps)])
    of_request = ended(
        first_scheduled_time=10.0,
        first_token_time=10.0 + event.gaps[0],
        last_token_time=now,
        finished_time=now,
        num_generated_tokens=num_tokens,
        num_cached_tokens=event.num_prompt_tokens // 2,
        num_preemptions=len(event.gaps),
        decoding_s=now - 10.0 - event.gaps[0],
        spec_decode_metrics=drafts,
    )
    metrics.note_end(event.reason, event.num_prompt_tokens, of_request)


@given(shares=st.lists(st.lists(_events, max_size=4), min_size=1, max_size=4))
@settings(deadline=None)
def test_sums_over_front_ends_are_those_of_one_that_saw_all(shares: list[list[Event]]) -> None:
    whole = EngineMetrics("demo", has_prefix_cache=True)
    together = RequestTotals()
    for share in shares:
        own = EngineMetrics("demo", has_prefix_cache=True)
        for event in share:
            note(own, event)
            note(whole, event)
        sent = msgspec.json.encode(own.totals([]))
        together.add(msgspec.json.decode(sent, type=RequestTotals))
    found, expected = list(metrics_of(together, {})), list(metrics_of(whole.totals([]), {}))
    assert without_sums(found) == without_sums(expected)
    assert sums(found) == pytest.approx(sums(expected))
    gaps = together.inter_token_latency
    assert sum(gaps.counts) == together.num_generated_tokens - sum(together.num_ended.values())


def without_sums(metrics: list[Metric]) -> list[Metric]:
    return [msgspec.structs.replace(one, sum=0.0) if isinstance(one, Histogram) else one for one in metrics]


def sums(metrics: list[Metric]) -> list[float]:
    return [one.sum for one in metrics if isinstance(one, Histogram)]


def histograms(metrics: EngineMetrics) -> dict[str, Histogram]:
    found = metrics.read(IDLE, [])
    return {one.name.removeprefix("penstock:"): one for one in found if isinstance(one, Histogram)}


def test_totals_are_a_copy() -> None:
    metrics = EngineMetrics("demo", has_prefix_cache=True)
    before = metrics.totals([])
    encoded = msgspec.json.encode(before)
    metrics.note_end(FinishReason.STOP, 5, ended(first_scheduled_time=11.0))
    metrics.note_later_tokens({11.0: 1}, 1, 12.0)
    metrics.note_refusal(EngineDead("The core was lost."))
    assert msgspec.json.encode(before) == encoded


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
    assert new["inter_token_latency_seconds"] == 12 - 3
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
