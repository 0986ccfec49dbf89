"""`/live`: numbers of a server for its live views."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from penstock.engine.live.live_view import LiveView
from penstock.engine.output.outputs import RequestMetrics
from penstock.engine.processes.broker_connection import BrokerState
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.engine.statistics.step_log import StepRecord
from penstock.scheduler.outputs import FinishReason
from penstock.server.metrics.front_end_metrics import FrontEndMetrics
from penstock.server.metrics.history import ServerHistory
from penstock.server.metrics.http_requests import HttpCounts
from penstock.server.metrics.launcher_metrics import LauncherMetrics
from penstock.server.page.live import ServerState
from penstock.server.processes.health import Health
from support.broker_statuses import BUSY
from support.scrapes import scrape
from support.server_process import ServerProcess
from support.waiting import wait_until


class Engine:
    """Engine with counts that are set by hand. watches: seconds of its watches."""

    def __init__(self) -> None:
        self.totals = RequestTotals()
        self.watches: list[float] = []

    def request_totals(self) -> RequestTotals:
        return self.totals

    def watch_steps(self, seconds: float) -> None:
        self.watches.append(seconds)


def view_of(engine: Engine, broker: BrokerState, folder: Path) -> LiveView:
    health = Health(broker, step_limit_s=60.0, silence_limit_s=60.0)
    given = cast(Any, engine)
    metrics = FrontEndMetrics(
        given, health, HttpCounts(), folder, number=0, model_name="demo", max_num_seqs=4, block_size=16
    )
    return LiveView(ServerState(given, health, metrics), model_name="demo", max_num_seqs=4)


def test_a_view_has_the_numbers_of_the_broker_and_of_the_requests(tmp_path: Path) -> None:
    engine, broker, launcher = Engine(), BrokerState(), LauncherMetrics(tmp_path, 1)
    metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=2.0, num_generated_tokens=7, num_cached_tokens=4)
    engine.totals.note_counts(10, metrics, has_prefix_cache=True)
    engine.totals.note_end(FinishReason.STOP, 10, metrics)
    engine.totals.note_first_token(1.5, 1.0)
    stats = msgspec.structs.replace(BUSY.stats, num_cached_blocks=5)
    broker.note(msgspec.structs.replace(BUSY, stats=stats))
    launcher.note_start("broker")
    launcher.note_start("broker")
    live = view_of(engine, broker, tmp_path).read(0.0)
    assert asdict(live.requests) == {"running": 3, "waiting": 2, "queued": 1, "unfinished": 7, "max_running": 8}
    kv_cache = live.kv_cache
    assert (kv_cache.num_blocks, kv_cache.used, kv_cache.cached, kv_cache.num_states) == (10, 4, 5, 0)
    counters = live.counters
    assert (counters.prompt_tokens, counters.cached_prompt_tokens, counters.generated_tokens) == (10, 4, 7)
    assert counters.finished_requests == 1
    assert asdict(live.time_to_first_token) == {"sum": 0.5, "count": 1}
    assert (live.cores.all, live.cores.recovering) == (2, 1)
    assert live.restarts == {"broker": 1, "front-end": 0, "core": 0, "workers": 0}
    assert engine.watches


def test_a_view_gets_each_step_once(tmp_path: Path) -> None:
    broker = BrokerState()
    view = view_of(Engine(), broker, tmp_path)
    steps = [StepRecord(float(time), 0.1, 1, 0, 1, 0) for time in range(1, 5)]
    broker.note(msgspec.structs.replace(BUSY, recent_steps=[steps[:2], steps[2:3]]))
    assert [(step.core, step.ended_at) for step in view.read(0.0).steps] == [(0, 1.0), (0, 2.0), (1, 3.0)]
    broker.note(msgspec.structs.replace(BUSY, recent_steps=[steps[3:], []]))
    assert [step.ended_at for step in view.read(3.0).steps] == [4.0]


def test_a_view_gets_the_samples_before_it_where_it_asks(tmp_path: Path) -> None:
    view = view_of(Engine(), BrokerState(), tmp_path)
    ServerHistory(tmp_path, max_num_seqs=4, logs=False).note(BUSY)
    assert view.read(0.0).history == []
    (sample,) = view.read(0.0, with_history=True).history
    assert (sample.requests.running, sample.kv_cache.num_blocks) == (3, 10)


def test_a_server_without_its_broker_is_not_ready(tmp_path: Path) -> None:
    assert view_of(Engine(), BrokerState(), tmp_path).read(0.0).not_ready == "the broker is being started"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    options = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB", "--api-key", "secret")
    server = ServerProcess(tmp_path / "log", *options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def read(server: ServerProcess, after: float = 0.0, key: str = "secret") -> dict[str, Any]:
    request = urllib.request.Request(f"{server.url}/live?after={after}", headers={"x-api-key": key})
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found


@contextmanager
def viewing(server: ServerProcess) -> Iterator[None]:
    """Poll a server as a live view does."""
    has_ended = threading.Event()

    def poll() -> None:
        while not has_ended.wait(0.2):
            read(server)

    read(server)
    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_of_a_real_server_add_up_and_recoveries_are_counted(server: ServerProcess) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        read(server, key="wrong")
    headers = {"x-api-key": "secret"}
    with viewing(server), server.client(default_headers=headers) as client:
        for _ in range(3):
            client.completions.create(
                model="demo", prompt="ROMEO: and then", max_tokens=40, n=2, extra_body={"ignore_eos": True}
            )
        wait_until(lambda: read(server)["counters"]["generated_tokens"] == 240)
        wait_until(lambda: 0 < sum_of(read(server)["steps"]) == scrape(server.url)["iteration_tokens_total_sum"])
        found = read(server)
        # Each sample's first token comes from its prefill.
        assert sum(step["decode"] for step in found["steps"]) == 240 - 6
        assert found["kv_cache"]["cached"] > 0
        assert "ROMEO" not in json.dumps(found)
        server.processes("core")[0].kill()
        wait_until(lambda: read(server)["restarts"]["core"] == 1)
        last = found["steps"][-1]["ended_at"]

        # The replacement records steps from the view's next renewal on.
        def has_new_steps() -> bool:
            client.completions.create(model="demo", prompt="a", max_tokens=3)
            return bool(read(server, last)["steps"])

        wait_until(has_new_steps)


def sum_of(steps: list[dict[str, Any]]) -> int:
    return sum(step["prefill"] + step["decode"] + step["draft"] for step in steps)
