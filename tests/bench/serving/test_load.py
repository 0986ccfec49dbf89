"""Load on servers with real sockets: arrivals, concurrency, failures."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.serving.api import BACKENDS, RequestBodies
from penstock.bench.serving.datasets import SampleRequest
from penstock.bench.serving.http import HttpClient
from penstock.bench.serving.load import PreparedRequest, run_load
from penstock.bench.serving.outcome import Outcome, Status
from penstock.bench.serving.results import failures, peak_concurrency
from penstock.bench.serving.settings import LoadSettings
from penstock.errors import ConfigError
from support.completion_server import CompletionServer, Handler, ServedRequest, answer, serving


def prepare(client: HttpClient, leave_after: Sequence[int | None], num_tokens: int = 3) -> list[PreparedRequest]:
    """Requests of a few tokens, one for each number of chunks after which the client leaves."""
    bodies = RequestBodies(BACKENDS["openai"], "served", {}, pytest.fail, seed=0)
    body, _ = bodies.make(SampleRequest([1, 2, 3], 3, num_tokens))
    message = client.message("POST", "/v1/completions", body)
    return [PreparedRequest(message, 3, leaves) for leaves in leave_after]


def run(
    handler: Handler, leave_after: Sequence[int | None] = (None,), num_tokens: int = 3, **load: float
) -> tuple[list[Outcome], CompletionServer]:
    """Outcomes of requests to a server with this handler."""

    async def measure() -> tuple[list[Outcome], CompletionServer]:
        settings = LoadSettings(**load)  # type: ignore[arg-type]
        async with serving(handler) as server:
            client = HttpClient(server.url, {}, time.perf_counter)
            requests = prepare(client, leave_after, num_tokens)
            arrivals = settings.arrivals(len(requests))
            outcomes = await run_load(client, requests, arrivals, settings, time.perf_counter, lambda: None)
            client.close()
            # The server notices what the client has closed.
            await asyncio.sleep(0.05)
            return outcomes, server

    return asyncio.run(measure())


def tokens_every(delay_s: float) -> Handler:
    return lambda request: answer(request, delay_s)


def test_a_thousand_streams_are_open_at_once() -> None:
    most = 0
    num_open = 0
    everyone = asyncio.Event()

    async def wait_for_everyone(request: ServedRequest) -> None:
        nonlocal most, num_open
        num_open += 1
        most = max(most, num_open)
        if num_open == 1000:
            everyone.set()
        await everyone.wait()
        await answer(request)

    outcomes, _ = run(wait_for_everyone, [None] * 1000)
    assert most == 1000
    assert {(outcome.status, outcome.output_len, outcome.text) for outcome in outcomes} == {
        (Status.COMPLETED, 3, "xxx")
    }
    assert peak_concurrency(outcomes) == 1000


def test_a_closed_loop_keeps_its_number_of_requests_open() -> None:
    num_open = 0
    seen = []

    async def count(request: ServedRequest) -> None:
        nonlocal num_open
        num_open += 1
        seen.append(num_open)
        await answer(request, 0.002)
        num_open -= 1

    outcomes, server = run(count, [None] * 20, max_concurrency=4)
    assert max(seen) == 4
    assert peak_concurrency(outcomes) == 4
    assert server.num_connections == 4


def test_time_of_a_request_begins_when_it_is_sent() -> None:
    outcomes, _ = run(tokens_every(0.01), [None] * 6, max_concurrency=1)
    assert min(outcome.latency_s for outcome in outcomes) < 0.09
    assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(outcomes))


def test_requests_begin_at_their_arrivals() -> None:
    outcomes, _ = run(answer, [None] * 20, request_rate=100.0)
    starts = np.asarray([outcome.start for outcome in outcomes])
    expected = np.asarray(LoadSettings(request_rate=100.0).arrivals(20))
    late = (starts - starts[0]) - (expected - expected[0])
    assert late.min() > -0.02
    assert np.median(late) < 0.02


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 55.0), ("exponential", math.sqrt(10 * 100))])
def test_the_rate_grows_from_the_first_request_to_the_last(strategy: str, middle: float) -> None:
    settings = LoadSettings(ramp_up_strategy=strategy, ramp_up_start_rps=10, ramp_up_end_rps=100, burstiness=1e6)
    rates = 1 / np.diff(settings.arrivals(1001), prepend=0.0)
    assert rates[[0, 500, -1]] == pytest.approx([10, middle, 100], rel=0.02)
    assert settings.rate == "10 to 100 requests/s"


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_gaps_between_arrivals_follow_a_gamma_distribution(burstiness: float) -> None:
    arrivals = LoadSettings(request_rate=50.0, burstiness=burstiness, seed=3).arrivals(20_000)
    gaps = np.diff(arrivals, prepend=0.0)
    assert arrivals[-1] == pytest.approx(20_000 / 50.0)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert (gaps >= 0).all()


def test_equal_seeds_give_equal_arrivals() -> None:
    def make(seed: int) -> list[float]:
        return LoadSettings(request_rate=5.0, seed=seed).arrivals(10)

    assert make(1) == make(1) != make(2)


def test_a_share_of_clients_disconnects_in_the_middle() -> None:
    leave_after = LoadSettings(disconnect_fraction=0.25, seed=1).leave_after([40] * 4000)
    left = [number for number in leave_after if number is not None]
    assert len(left) / 4000 == pytest.approx(0.25, abs=0.03)
    assert min(left) >= 1
    assert max(left) < 40


def test_a_client_that_leaves_closes_its_connection() -> None:
    outcomes, server = run(tokens_every(0.005), [None, 1, 2, None], num_tokens=20)
    assert [outcome.status.name for outcome in outcomes] == ["COMPLETED", "DISCONNECTED", "DISCONNECTED", "COMPLETED"]
    assert [len(outcome.chunk_times) for outcome in outcomes] == [20, 1, 2, 20]
    assert server.num_cut == 2


async def cut_in_the_middle(request: ServedRequest) -> None:
    await request.begin_stream()
    await request.event({"choices": [{"text": "a"}]})
    await asyncio.sleep(0.01)
    request.cut()


async def malformed_chunk(request: ServedRequest) -> None:
    await request.begin_stream()
    await request.event("{broken")


async def malformed_framing(request: ServedRequest) -> None:
    await request.begin_stream()
    await request.write(b"nonsense\r\n")


async def bad_request(request: ServedRequest) -> None:
    await request.whole(400, {"error": {"message": f"number {request.number} is bad"}})


async def never(request: ServedRequest) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("handler", "cause", "message"),
    [
        (cut_in_the_middle, "connection lost", "within the response"),
        (malformed_chunk, "malformed chunk", "{broken"),
        (malformed_framing, "malformed response", "nonsense"),
        (bad_request, "HTTP 400", "number 0 is bad"),
        (never, "timeout", "within 0.1 s"),
    ],
)
def test_failures_are_counted_by_cause_with_their_first_error(
    handler: Callable[[ServedRequest], None], cause: str, message: str
) -> None:
    outcomes, _ = run(handler, [None] * 3, max_concurrency=1, request_timeout_s=0.1)  # type: ignore[arg-type]
    found = failures(outcomes)
    assert list(found) == [cause]
    assert found[cause]["count"] == 3
    assert message in found[cause]["first"]
    assert {outcome.status for outcome in outcomes} == {Status.FAILED}


def test_a_refused_connection_is_a_failure() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = listener.getsockname()

    async def measure() -> list[Outcome]:
        client = HttpClient(f"http://127.0.0.1:{address[1]}", {}, time.perf_counter)
        settings = LoadSettings()
        requests = prepare(client, [None])
        return await run_load(client, requests, [0.0], settings, time.perf_counter, lambda: None)

    assert list(failures(asyncio.run(measure()))) == ["connection refused"]


def test_rejections_are_counted_apart_with_their_retry_after() -> None:
    async def reject_half(request: ServedRequest) -> None:
        if request.number % 2:
            await request.whole(429, {"error": {"message": "queue is full"}}, "Retry-After: 3")
        else:
            await answer(request)

    outcomes, _ = run(reject_half, [None] * 4, max_concurrency=1)
    assert [outcome.status.name for outcome in outcomes] == ["COMPLETED", "REJECTED"] * 2
    assert [outcome.retry_after_s for outcome in outcomes] == [None, 3.0] * 2
    assert failures(outcomes) == {"HTTP 429": {"count": 2, "first": "queue is full"}}


def test_a_failure_leaves_other_requests_alone() -> None:
    async def cut_first(request: ServedRequest) -> None:
        if request.number == 0:
            await cut_in_the_middle(request)
        else:
            await answer(request, 0.01)

    outcomes, _ = run(cut_first, [None] * 5)
    assert sorted(outcome.status.name for outcome in outcomes) == ["COMPLETED"] * 4 + ["FAILED"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=12))
def test_peak_concurrency_is_that_of_the_busiest_moment(spans: list[tuple[int, int]]) -> None:
    outcomes = [Outcome(start=float(start), end=float(start + length)) for start, length in spans]
    moments = [moment + 0.5 for moment in range(41)]
    assert peak_concurrency(outcomes) == max(sum(o.start < moment < o.end for o in outcomes) for moment in moments)


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ({"request_rate": 0.0}, "--request-rate 0.0"),
        ({"request_rate": math.nan}, "--request-rate nan"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"max_concurrency": 0}, "--max-concurrency 0"),
        ({"disconnect_fraction": 1.5}, "--disconnect-fraction 1.5"),
        ({"request_timeout_s": 0.0}, "--request-timeout"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_an_invalid_load_is_refused(option: dict[str, float], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        LoadSettings(**option)  # type: ignore[arg-type]
