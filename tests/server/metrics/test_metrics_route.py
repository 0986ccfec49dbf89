"""`/metrics` of a real server: equal to what its clients did, whichever of its processes are lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from openai import BadRequestError, NotFoundError, RateLimitError

from penstock.engine.statistics.step_phases import StepPhase
from penstock.server.metrics.table import TABLE
from support.checkpoints import tiny_checkpoint
from support.scrapes import OPEN_METRICS, Scrape, scrape
from support.server_process import ServerProcess
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "1", "--max-num-queued-requests", "2")
PROMPT = "ROMEO: and then"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "log", *SMALL, "--api-server-count", "2")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


class Clients:
    """Clients of a server, and the counts of their requests."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.num_prompt_tokens = self.num_generated_tokens = self.num_samples = self.num_calls = 0

    def complete(self, n: int, max_tokens: int) -> None:
        """Complete a prompt over a connection of its own, once the server has nothing else to do."""
        self.wait_for_idleness()
        with self.server.client() as client:
            answer = client.completions.create(
                model="demo", prompt=PROMPT, n=n, max_tokens=max_tokens, extra_body={"ignore_eos": True}
            )
        assert answer.usage is not None
        # Every sample runs a prompt of its own in the engine.
        self.num_prompt_tokens += n * answer.usage.prompt_tokens
        self.num_generated_tokens += answer.usage.completion_tokens
        self.num_samples += n
        self.num_calls += 1

    def wait_for_idleness(self) -> None:
        wait_until(lambda: scrape(self.server.url)["num_requests"] == 0)

    @property
    def expected(self) -> dict[str, float]:
        return {
            "prompt_tokens_total": self.num_prompt_tokens,
            "prefix_cache_queries_total": self.num_prompt_tokens,
            "generation_tokens_total": self.num_generated_tokens,
            "request_prompt_tokens_count": self.num_samples,
            "request_prompt_tokens_sum": self.num_prompt_tokens,
            "request_generation_tokens_sum": self.num_generated_tokens,
            "time_to_first_token_seconds_count": self.num_samples,
            "inter_token_latency_seconds_count": self.num_generated_tokens - self.num_samples,
            "request_time_per_output_token_seconds_count": self.num_samples,
            "e2e_request_latency_seconds_count": self.num_samples,
            "request_queue_time_seconds_count": self.num_samples,
            "request_prefill_time_seconds_count": self.num_samples,
            "request_decode_time_seconds_count": self.num_samples,
        }


@contextmanager
def suspended(*processes: psutil.Process) -> Iterator[None]:
    """Stop processes, and let them go on if they still exist."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            if process.is_running():
                process.resume()


def fresh(server: ServerProcess) -> Scrape:
    """Scrape after every front end has had time to write its counts."""
    time.sleep(1.5)
    return scrape(server.url)


def is_no_less(now: Scrape, before: Scrape) -> bool:
    counters = now.counters()
    return all(counters[key] >= value for key, value in before.counters().items())


def each_front_end(server: ServerProcess) -> Iterator[psutil.Process]:
    """Front ends, each while the other one is stopped."""
    one, other = server.processes("front-end")
    with suspended(other):
        yield one
    with suspended(one):
        yield other


def test_counts_are_exactly_what_the_clients_did(server: ServerProcess) -> None:
    clients = Clients(server)
    for number, _ in enumerate(each_front_end(server)):
        clients.complete(n=1, max_tokens=7 + number)
        clients.complete(n=3, max_tokens=4)
    with server.client() as client:
        with pytest.raises(BadRequestError):
            client.completions.create(model="demo", prompt="a", max_tokens=-1)
        with pytest.raises(NotFoundError):
            client.models.retrieve("nothing")
    found = fresh(server)
    for _ in each_front_end(server):
        assert {name: scrape(server.url)[name] for name in clients.expected} == clients.expected
    assert found.get("request_success_total", finished_reason="length") == clients.num_samples
    statuses = {"200": clients.num_calls, "400": 1}
    for status, number in statuses.items():
        assert found.get("http_requests_total", handler="/v1/completions", method="POST", status=status) == number
    assert found.get("http_requests_total", handler="/v1/models/{id:path}", method="GET", status="404") == 1
    # Every computed token is one of a prompt that was not cached, or a generated one but the last.
    num_computed = clients.num_prompt_tokens - found["prefix_cache_hits_total"]
    num_computed += clients.num_generated_tokens - clients.num_samples
    assert found["iteration_tokens_total_sum"] == num_computed
    assert found["step_duration_seconds_count"] == found["iteration_tokens_total_count"] > 0
    by_phase = {phase: found.get("step_phase_seconds_sum", phase=phase) for phase in StepPhase}
    assert all(found.get("step_phase_seconds_count", phase=phase) > 0 for phase in StepPhase)
    # Results are sent after the step.
    within_steps = sum(seconds for phase, seconds in by_phase.items() if phase is not StepPhase.SEND)
    assert 0.5 < within_steps / found["step_duration_seconds_sum"] < 1.2
    assert by_phase[StepPhase.EXECUTE] > by_phase[StepPhase.UPDATE]
    assert found.get("build_info", model_name="demo", version="0.1.0") == 1
    in_open_metrics = scrape(server.url, OPEN_METRICS)
    assert is_no_less(in_open_metrics, found)
    described = {f"penstock:{name}": one.kind for name, one in TABLE.items() if not name.startswith("expert_")}
    assert in_open_metrics.kinds == described
    # The older format knows no kind for it.
    del described["penstock:build"]
    assert found.kinds == {**described, "penstock:build_info": "gauge"}


def num_restarts(server: ServerProcess, process: str) -> float:
    return scrape(server.url).get("process_restarts_total", process=process)


def test_workers_that_a_core_replaces_are_counted(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "log", *SMALL, "--tensor-parallel-size", "2")
    try:
        server.wait_until_ready()
        for number in range(2):
            assert num_restarts(server, "workers") == number
            server.processes("worker")[0].kill()
            wait_until(lambda number=number: num_restarts(server, "workers") > number)  # type: ignore[misc]
        assert [num_restarts(server, process) for process in ("workers", "core", "broker")] == [2, 0, 0]
    finally:
        server.close()


def test_a_core_that_stands_still_delays_no_scrape(server: ServerProcess) -> None:
    core = server.processes("core")[0]
    with server.client() as client:
        stream = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        with suspended(core):
            wait_until(lambda: scrape(server.url)["core_stalled_seconds"] > 0.5)
            found = scrape(server.url, timeout_s=5.0)
            assert (found["num_requests"], found["num_requests_running"], found["alive"]) == (1, 1, 1)
            with server.client() as other, pytest.raises(RateLimitError):
                other.completions.create(model="demo", prompt=PROMPT, n=3)
            stream.close()
            wait_until(lambda: scrape(server.url).get("request_success_total", finished_reason="abort") == 1)
    found = fresh(server)
    # Each choice counts as a request.
    assert found.get("requests_refused_total", reason="queue_full") == 3
    assert found.get("http_requests_total", handler="/v1/completions", method="POST", status="429") == 1
    reasons = ("stop", "length", "abort", "error")
    ends = [found.get("request_success_total", finished_reason=reason) for reason in reasons]
    assert ends == [0, 0, 1, 0]


def test_counters_never_decrease_when_front_ends_are_killed(server: ServerProcess) -> None:
    clients = Clients(server)
    one, other = server.processes("front-end")
    with suspended(other):
        clients.complete(n=2, max_tokens=9)
        # What was scraped from it right before its end must not be lost.
        before = scrape(server.url)
        one.kill()
    after = scrape(server.url)
    assert is_no_less(after, before)
    assert after["generation_tokens_total"] == clients.num_generated_tokens
    wait_until(lambda: scrape(server.url).get("process_restarts_total", process="front-end") == 1)
    other.kill()
    wait_until(lambda: len(server.processes("front-end")) == 2 and other not in server.processes("front-end"))
    clients.complete(n=1, max_tokens=5)
    last = fresh(server)
    assert is_no_less(last, after)
    assert {name: last[name] for name in clients.expected} == clients.expected


def test_a_server_without_its_broker_answers_and_forgets_nothing(server: ServerProcess) -> None:
    clients = Clients(server)
    clients.complete(n=1, max_tokens=20)
    before = fresh(server)
    assert before["step_duration_seconds_count"] > 0
    server.processes("broker")[0].kill()
    wait_until(lambda: scrape(server.url)["ready"] == 0)
    without = scrape(server.url, timeout_s=5.0)
    assert is_no_less(without, before)
    assert without["alive"] == 1
    wait_until(lambda: scrape(server.url)["ready"] == 1)
    clients.complete(n=1, max_tokens=20)
    after = fresh(server)
    assert is_no_less(after, without)
    assert after["step_duration_seconds_count"] > before["step_duration_seconds_count"]
    assert after.get("process_restarts_total", process="broker") == 1
    assert {name: after[name] for name in clients.expected} == clients.expected


def test_a_mixture_shows_the_tokens_of_its_experts(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    options = ["--load-format", "dummy", "--tokenizer", "demo", "--expert-stats", "--data-parallel-size", "2"]
    server = ServerProcess(tmp_path / "log", *SMALL[:4], *options, model=str(tmp_path / "model"))
    try:
        server.wait_until_ready()
        assert scrape(server.url).get("expert_tokens_total", layer="0") == 0
        with server.client() as client:
            model = client.models.list().data[0].id
            usages = [
                client.completions.create(
                    model=model, prompt=[*range(7, 20)], max_tokens=5, extra_body={"ignore_eos": True}
                ).usage
                for _ in range(2)
            ]
        assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages if usage] == [(13, 5)] * 2
        found = fresh(server)
        num_cached = found["prefix_cache_hits_total"]
        # Three experts per token; the last generated token is not computed.
        assert found.get("expert_tokens_total", layer="0") == 3 * (2 * (13 + 4) - num_cached)
        assert found.get("expert_imbalance", layer="0") > 1
    finally:
        server.close()
