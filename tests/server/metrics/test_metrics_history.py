"""History of a server: samples for its views, and a line of the log per ten seconds of work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine.messages import BrokerStatus
from penstock.engine.output.outputs import RequestMetrics
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.scheduler.outputs import NO_STATS
from penstock.server.metrics.folder import SharedFile
from penstock.server.metrics.front_end_metrics import FrontEndTotals
from penstock.server.metrics.history import ServerHistory, read_history
from support.broker_statuses import BUSY

IDLE = BrokerStatus(stats=NO_STATS, num_engines=1, num_recovering=0)


class Server:
    """History under a clock that is set by hand, and totals of one front end."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, logs: bool = True) -> None:
        self.now = 1000.0
        self.folder = folder
        for module in ("penstock.engine.live.live_view", "penstock.server.metrics.history"):
            monkeypatch.setattr(f"{module}.time.time", lambda: self.now)
        self.totals = RequestTotals()
        self.history = ServerHistory(folder, max_num_seqs=4, logs=logs)

    def pass_s(
        self, seconds: int, status: BrokerStatus, *, prompt: int = 0, cached: int = 0, generated: int = 0
    ) -> None:
        """Let time pass, with four heartbeats a second, after a request of so many tokens."""
        if prompt or generated:
            metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=2.0)
            metrics.num_generated_tokens, metrics.num_cached_tokens = generated, cached
            self.totals.note_counts(prompt, metrics, has_prefix_cache=True)
        SharedFile(self.folder, "front-end-0").write(FrontEndTotals(self.totals, []))
        for _ in range(4 * seconds):
            self.now += 0.25
            self.history.note(status)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    return lambda **options: Server(tmp_path, monkeypatch, **options)


def test_there_are_the_samples_of_two_minutes_one_per_second(server: Callable[..., Server]) -> None:
    one = server()
    assert read_history(one.folder) == []
    one.pass_s(5, BUSY, prompt=30, cached=12, generated=50)
    samples = read_history(one.folder)
    assert [sample.time for sample in samples] == [1000.25 + second for second in range(5)]
    last = samples[-1]
    assert (last.requests.running, last.requests.max_running, last.kv_cache.used) == (3, 8, 4)
    assert (last.counters.prompt_tokens, last.counters.generated_tokens) == (30, 50)
    one.pass_s(300, IDLE)
    assert len(read_history(one.folder)) == 120


def test_ten_seconds_of_work_are_a_line_and_idle_ones_are_none(
    server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    one = server()
    with caplog.at_level(logging.INFO, logger="penstock"):
        one.pass_s(30, IDLE)
        assert not caplog.records
        one.pass_s(10, BUSY, prompt=100, cached=40, generated=50)
        (line,) = caplog.messages
        one.pass_s(50, IDLE)
        assert caplog.messages == [line]
    assert line == (
        "Last 10 s: 5.0 tokens/s generated, 10.0 tokens/s of prompts, 3 running, 4 waiting, KV cache 40.0% used, "
        "prefix hits 40.0%"
    )


def test_the_lines_are_off_by_an_option(server: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    one = server(logs=False)
    with caplog.at_level(logging.INFO, logger="penstock"):
        one.pass_s(20, BUSY, prompt=100, generated=50)
    assert not caplog.records
    assert read_history(one.folder)
