"""Benchmarks of servers, with a small server in a process of its own instead of Penstock's."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.server_process import ServerProcess, Usage
from benchmarks.serving import (
    Client,
    Figure,
    Requests,
    as_markdown,
    measure_first_token,
    measure_streams,
    measure_throughput,
)
from benchmarks.soak import Findings, Sample, soak
from benchmarks.soak import as_markdown as soak_page
from benchmarks.soak_requests import KINDS, SoakRequest, metric

from penstock.bench.serving.datasets import SampleRequest
from penstock.bench.serving.http import WholeResponse
from penstock.bench.serving.outcome import Outcome, Status
from support.completion_server import ServedRequest, answer, serving_in_a_thread

SMALL_SERVER = [sys.executable, str(Path(__file__).parents[1] / "support" / "completion_server.py")]


class ConstantEngine:
    """Offline engine of a known speed."""

    def __init__(self, tokens_per_s: float, ttft_s: float = 0.0) -> None:
        self._tokens_per_s = tokens_per_s
        self._ttft_s = ttft_s

    def run(self, requests: list[SampleRequest]) -> dict[str, Any]:
        num_tokens = sum(request.output_len for request in requests)
        return {
            "seconds": num_tokens / self._tokens_per_s,
            "num_tokens": num_tokens,
            "ttfts": [self._ttft_s] * len(requests),
        }


def test_a_server_is_started_watched_and_ended(tmp_path: Path) -> None:
    others = set(psutil.Process().children())
    with ServerProcess(SMALL_SERVER, tmp_path / "log") as server:
        usage = server.usage()
        (child,) = set(psutil.Process().children()) - others
    assert usage.memory_bytes > 2**20
    assert (usage.num_processes, usage.num_threads) == (1, 1)
    assert usage.num_descriptors > 3
    assert not child.is_running()


def test_a_server_that_ends_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(RuntimeError, match=r"ended with code 1(.|\n)*no such model"),
        ServerProcess(command, tmp_path / "log"),
    ):
        pass


def test_throughputs_are_ratios_with_targets() -> None:
    async def slowly(request: ServedRequest) -> None:
        await answer(request, 0.0001)

    requests = Requests(vocab_size=1000)
    with serving_in_a_thread(slowly) as server:
        client = Client(server.url, "served")
        slow, fast = (measure_throughput(client, ConstantEngine(speed), requests, 1) for speed in (1.0, 1e9))
    assert [figure.is_met for figure in slow] == [None, True, True]
    assert [figure.is_met for figure in fast] == [None, False, False]
    body = server.requests[-1].body
    assert (body["ignore_eos"], body["model"]) == (True, "served")
    assert {request.body["stream"] for request in server.requests} == {True, False}
    assert len({tuple(request.body["prompt"]) for request in server.requests}) == len(server.requests)


def test_first_tokens_are_compared_with_the_offline_engines() -> None:
    async def late(request: ServedRequest) -> None:
        await answer(request, 0.004)

    with serving_in_a_thread(late) as server:
        client = Client(server.url, "served")
        requests = Requests(vocab_size=1000)
        missed = measure_first_token(client, ConstantEngine(1.0, ttft_s=0.0), requests, 1)
        met = measure_first_token(client, ConstantEngine(1.0, ttft_s=1.0), requests, 1)
    assert (missed[-1].is_met, met[-1].is_met) == (False, True)


def test_many_streams_are_counted_with_their_memory(tmp_path: Path) -> None:
    with ServerProcess(SMALL_SERVER, tmp_path / "log") as server:
        figures = measure_streams(Client(server.url, "served"), server, Requests(vocab_size=1000), 300)
    assert figures[0].is_met
    assert figures[0].name == "300 streams at once"
    assert "KiB per stream" in figures[2].value
    before, after = figures[4].value.split(", ")
    assert int(before) <= int(after) < int(before) + 10


def test_the_page_says_which_targets_are_missed() -> None:
    page = as_markdown([Figure("a", "1", "at least 2", False), Figure("b", "3", "at least 2", True)], {"threads": 2})
    assert "| a | 1 | at least 2 | missed |" in page
    assert "| b | 3 | at least 2 | met |" in page


def test_every_kind_of_request_of_a_soak_can_be_sent() -> None:
    for kind in KINDS:
        for seed in range(20):
            request = kind(random.Random(seed), "served")
            assert request.path.startswith("/v1/")
            assert isinstance(request.body, str) or json.dumps(request.body)


def outcome(status: Status, http_status: int | None = 200, cause: str = "", text: str = "") -> Outcome:
    return Outcome(start=0.0, status=status, http_status=http_status, cause=cause, text=text, finish_reason="stop")


@pytest.mark.parametrize(
    ("request_", "end", "is_fault"),
    [
        (SoakRequest("/", {}), outcome(Status.COMPLETED), False),
        (SoakRequest("/", {}), outcome(Status.FAILED, 500, "HTTP 500"), True),
        (SoakRequest("/", {}), outcome(Status.FAILED, 200, "connection lost"), True),
        (SoakRequest("/", {}), outcome(Status.FAILED, None, "connection refused"), True),
        (SoakRequest("/", {}), outcome(Status.FAILED, 503, "HTTP 503"), True),
        (SoakRequest("/", {}), outcome(Status.REJECTED, 429, "HTTP 429"), False),
        (SoakRequest("/", {}, leave_after=1), outcome(Status.DISCONNECTED), False),
        (SoakRequest("/", {}, statuses=(400,)), outcome(Status.FAILED, 400, "HTTP 400"), False),
        (SoakRequest("/", {}, statuses=(400,)), outcome(Status.COMPLETED), True),
        (SoakRequest("/", {}, statuses=(200, 408)), outcome(Status.FAILED, 408, "HTTP 408"), False),
        (SoakRequest("/", {}, may_time_out=True), outcome(Status.FAILED, 200, "error in the stream"), False),
        (SoakRequest("/", {}), outcome(Status.FAILED, 200, "error in the stream"), True),
    ],
)
def test_ends_that_a_client_did_not_cause_are_faults(request_: SoakRequest, end: Outcome, is_fault: bool) -> None:
    assert (request_.fault(end) is not None) == is_fault


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ('{"colour": "red", "is_new": true}', False),
        ('{"colour": "red"', True),
        ('{"colour": "red", "is_new": 1}', True),
        ("[]", True),
    ],
)
def test_answers_that_are_not_of_their_schema_are_faults(text: str, is_fault: bool) -> None:
    (kind,) = (kind for kind in KINDS if kind.__name__ == "json_schema")
    request = kind(random.Random(0), "served")
    assert (request.fault(outcome(Status.COMPLETED, text=text)) is not None) == is_fault


def test_metrics_are_summed_whatever_their_prefix_and_labels() -> None:
    response = WholeResponse()
    text = '# HELP x:running a\nx:running{engine="0"} 2.0\nx:running{engine="1"} 3.0\nwaiting 4\n'
    response.feed(text.encode(), 0.0)
    assert [metric(response, name) for name in ("running", "waiting", "other")] == [5.0, 4.0, None]


def findings(*memory: int) -> Findings:
    samples = [
        Sample(float(second), Usage(size, 1, 1, 1, 0.0), running=0.0, waiting=0.0) for second, size in enumerate(memory)
    ]
    return Findings(samples=samples)


def test_growth_after_the_warm_up_is_a_complaint_and_growth_before_is_none() -> None:
    assert findings(10, 50, *[100] * 10).complaints() == []
    assert findings(*range(100, 120)).complaints() == ["memory grew by 12.4%"]
    assert findings(100, 200).growth() is None


def test_requests_that_are_left_are_a_complaint() -> None:
    found = findings(*[100] * 10)
    found.left = 2.0
    assert "2 requests still ran" in found.complaints()[0]


@pytest.mark.parametrize("leak_bytes", [0, 200_000])
def test_a_soak_finds_a_leak_and_faults(tmp_path: Path, leak_bytes: int) -> None:
    arguments = argparse.Namespace(seed=0, minutes=2 / 60, clients=8, interval=0.1)
    command = [*SMALL_SERVER, "--leak-bytes", str(leak_bytes)]
    begin = time.monotonic()
    found = soak(command, "served", tmp_path / "log", arguments)
    assert time.monotonic() - begin < 15
    assert sum(sum(ends.values()) for ends in found.ends.values()) > 50
    assert set(found.ends) <= {kind.__name__.replace("_", " ") for kind in KINDS}
    assert found.left == 0.0
    growth = found.growth()
    assert growth is not None
    assert growth > 0.2 if leak_bytes else growth < 0.1
    # The small server ignores schemas, and answers most bad requests.
    assert set(found.faults) <= {"json schema", "bad request"}
    assert "after the warm-up" in soak_page(found, {"threads": 2})
