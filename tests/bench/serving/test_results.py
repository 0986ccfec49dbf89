"""Figures of a benchmark, computed again with the standard library, from scripted times."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.serving.outcome import Outcome, Status
from penstock.bench.serving.results import details, parse_goodput, summarize
from penstock.bench.serving.run import ServeSettings
from penstock.bench.serving.run import run as run_benchmark
from penstock.bench.serving.settings import DatasetSettings, LoadSettings
from penstock.errors import ConfigError
from support.completion_server import ServedRequest, serving

ALL = ("ttft", "tpot", "itl", "e2el")


def completed(start: float, *chunk_times: float, prompt_len: int = 10, end: float | None = None) -> Outcome:
    """A stream with a token at each of these times."""
    return Outcome(
        start=start,
        prompt_len=prompt_len,
        output_len=len(chunk_times),
        is_counted=True,
        end=chunk_times[-1] if end is None else end,
        first_token=chunk_times[0],
        chunk_times=list(chunk_times),
        status=Status.COMPLETED,
    )


def figures(outcomes: Sequence[Outcome], **options: Any) -> dict[str, Any]:
    settings = {"percentile_metrics": ALL, "metric_percentiles": (50, 90, 99), "goodput": {}, **options}
    return summarize(outcomes, **settings)


GAPS = st.lists(st.floats(0.001, 10.0), min_size=2, max_size=6)


@given(st.lists(GAPS, min_size=2, max_size=8))
def test_percentiles_are_those_of_the_scripted_gaps(requests: list[list[float]]) -> None:
    outcomes = []
    for index, gaps in enumerate(requests):
        times = [index + sum(gaps[: count + 1]) for count in range(len(gaps))]
        outcomes.append(completed(float(index), *times))
    found = figures(outcomes)
    expected = {
        "ttft": [gaps[0] for gaps in requests],
        "itl": [gap for gaps in requests for gap in gaps[1:]],
        "tpot": [sum(gaps[1:]) / len(gaps[1:]) for gaps in requests],
        "e2el": [sum(gaps) for gaps in requests],
    }
    for metric, values in expected.items():
        in_ms = [1000 * value for value in values]
        assert found[f"mean_{metric}_ms"] == pytest.approx(statistics.fmean(in_ms), abs=1e-6)
        assert found[f"median_{metric}_ms"] == pytest.approx(statistics.median(in_ms), abs=1e-6)
        assert found[f"std_{metric}_ms"] == pytest.approx(statistics.pstdev(in_ms), abs=1e-5)
        hundredths = statistics.quantiles(in_ms, n=100, method="inclusive")
        assert found[f"p90_{metric}_ms"] == pytest.approx(hundredths[89], abs=1e-6)
        assert found[f"p99_{metric}_ms"] == pytest.approx(hundredths[98], abs=1e-6)


def test_throughput_counts_completed_requests_over_the_whole_time() -> None:
    failed = Outcome(start=0.0, end=4.0, prompt_len=99)
    failed.fail("timeout", "late")
    found = figures([completed(1.0, 2.0, 3.0), completed(1.5, 2.5, prompt_len=4), failed])
    assert found["duration"] == 4.0
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (14, 3)
    assert found["request_throughput"] == pytest.approx(2 / 4)
    assert found["output_throughput"] == pytest.approx(3 / 4)
    assert found["total_token_throughput"] == pytest.approx(17 / 4)
    assert found["max_output_tokens_per_s"] == 2
    assert found["failures"] == {"timeout": {"count": 1, "first": "late"}}


def test_a_chunk_with_several_tokens_counts_as_several_per_second() -> None:
    outcome = completed(0.0, 0.1, 0.2)
    outcome.output_len = 6
    assert figures([outcome])["max_output_tokens_per_s"] == pytest.approx(6)


def test_goodput_counts_requests_that_meet_every_target() -> None:
    outcomes = [completed(0.0, 0.1, 0.2), completed(0.0, 0.3, 0.4), completed(0.0, 0.1, 2.0), completed(0.0, 0.15)]
    assert figures(outcomes, goodput={"ttft": 200.0})["request_goodput"] == pytest.approx(3 / 2)
    assert figures(outcomes, goodput={"ttft": 200.0, "tpot": 150.0})["request_goodput"] == pytest.approx(2 / 2)
    assert figures(outcomes, goodput={"e2el": 180.0})["request_goodput"] == pytest.approx(1 / 2)
    assert figures(outcomes)["request_goodput"] is None


def test_figures_without_values_are_none() -> None:
    whole = Outcome(start=0.0, end=1.0, output_len=4, is_counted=True, status=Status.COMPLETED)
    found = figures([whole])
    assert found["mean_ttft_ms"] is found["p99_itl_ms"] is found["max_output_tokens_per_s"] is None
    assert found["mean_e2el_ms"] == 1000.0


def test_percentiles_may_have_fractions() -> None:
    assert figures([completed(0.0, 0.5)], metric_percentiles=(99.9,))["p99.9_ttft_ms"] == pytest.approx(500.0)


def test_details_are_in_the_order_of_the_requests() -> None:
    failed = Outcome(start=1.0, end=2.0)
    failed.fail("HTTP 400", "bad")
    found = details([completed(0.0, 0.25, 0.75), failed])
    assert found["ttfts"] == [0.25, None]
    assert found["itls"] == [[0.5], []]
    assert found["errors"] == ["", "bad"]
    assert found["input_lens"] == [10, None]


def test_targets_are_parsed() -> None:
    assert parse_goodput(["ttft:200", "tpot:12.5"]) == {"ttft": 200.0, "tpot": 12.5}


@pytest.mark.parametrize("target", ["ttft", "itl:3", "ttft:soon", "ttft:-1", "ttft:nan"])
def test_an_invalid_target_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput {target}"):
        parse_goodput([target])


class ScriptedClock:
    """Clock that a server sets. It is late by nothing: the server waits until the client has read it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now

    async def pass_by(self, seconds: float, request: ServedRequest, *events: Any) -> None:
        """Send events some seconds later, and wait for the client."""
        self.now += seconds
        before = self.num_reads
        for event in events:
            await request.event(event)
        while self.num_reads == before:
            await asyncio.sleep(0)


def test_a_benchmark_measures_the_delays_of_its_server() -> None:
    """Whole runs, one request at a time: the clock passes only when the server says so."""
    gaps = [[0.5, 0.1, 0.1], [0.25, 0.2, 0.4], [1.0, 0.3, 0.1]]
    clock = ScriptedClock()

    async def scripted(request: ServedRequest) -> None:
        await request.begin_stream()
        first, second, third = gaps[request.number]
        await clock.pass_by(first, request, {"choices": [{"text": "a"}]})
        await clock.pass_by(second, request, {"choices": [{"text": "b"}]})
        usage = {"prompt_tokens": 8, "completion_tokens": 3}
        end = [{"choices": [{"text": "c", "finish_reason": "length"}], "usage": usage}, "[DONE]"]
        await clock.pass_by(third, request, *end)
        await request.end_stream()

    async def measure() -> dict[str, Any]:
        async with serving(scripted) as server:
            settings = ServeSettings(
                base_url=server.url,
                dataset=DatasetSettings(num_prompts=3, random_input_len=8, random_output_len=3),
                load=LoadSettings(max_concurrency=1),
                model="demo",
                percentile_metrics=ALL,
            )
            return (await run_benchmark(settings, lambda total: Bar(), clock)).figures

    found = asyncio.run(measure())
    assert found["median_ttft_ms"] == pytest.approx(500.0)
    assert found["mean_itl_ms"] == pytest.approx(1000 * statistics.fmean([0.1, 0.1, 0.2, 0.4, 0.3, 0.1]))
    assert found["median_tpot_ms"] == pytest.approx(200.0)
    assert found["mean_e2el_ms"] == pytest.approx(1000 * statistics.fmean([0.7, 0.85, 1.4]))
    assert found["duration"] == pytest.approx(0.7 + 0.85 + 1.4)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (24, 9)


class Bar:
    def update(self) -> None:
        pass
