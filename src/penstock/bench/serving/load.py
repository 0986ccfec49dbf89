"""Load on a server: when requests begin, how many are open at once, and how each of them ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.bench.serving.http import Clock, ConnectionLost, HttpClient, MalformedResponse, Message
from penstock.bench.serving.outcome import AnswerReader, ClientLeaves, Outcome, RequestFailed, Status
from penstock.errors import ConfigError


@dataclass(frozen=True)
class LoadSettings:
    """Load of a benchmark.

    request_rate: mean arrivals per second; infinity sends all requests at once. burstiness: shape of the gamma
    distribution of gaps between arrivals; 1 is a Poisson process, less is burstier. max_concurrency: open requests; a
    request that arrives meanwhile waits, and its time begins when it is sent. request_timeout_s: of the client.
    disconnect_fraction: share of requests whose client disconnects in the middle of the response.

    Raises ConfigError for values that are not allowed.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    request_timeout_s: float = 6 * 3600.0
    disconnect_fraction: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        concurrency = self.max_concurrency
        for flag, value, is_valid, allowed in (
            ("--request-rate", self.request_rate, self.request_rate > 0, "more than 0, or inf"),
            ("--burstiness", self.burstiness, 0 < self.burstiness < math.inf, "more than 0"),
            ("--max-concurrency", concurrency, concurrency is None or concurrency > 0, "1 or more"),
            ("--request-timeout", self.request_timeout_s, self.request_timeout_s > 0, "more than 0 seconds"),
            ("--disconnect-fraction", self.disconnect_fraction, 0 <= self.disconnect_fraction <= 1, "0 to 1"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
        ):
            if not is_valid:
                raise ConfigError(f"{flag} {value} is not valid. Allowed: {allowed}.")

    def arrivals(self, num_requests: int) -> list[float]:
        """Seconds from the start to each request's arrival, in order.

        They are scaled to take num_requests / request_rate seconds, so that the rate is exact for few requests too.
        """
        if math.isinf(self.request_rate):
            return [0.0] * num_requests
        rng = np.random.default_rng([self.seed, 1])
        offsets = np.cumsum(rng.gamma(shape=self.burstiness, size=num_requests))
        scale = num_requests / self.request_rate / offsets[-1]
        return [float(offset) for offset in offsets * scale]

    def leave_after(self, output_lens: Sequence[int]) -> list[int | None]:
        """Chunks after which each request's client disconnects; None for clients that stay.

        output_lens: requested output lengths, in tokens.
        """
        rng = np.random.default_rng([self.seed, 2])
        leaves = rng.random(len(output_lens)) < self.disconnect_fraction
        chunks = [int(rng.integers(1, max(length, 2))) for length in output_lens]
        return [number if does else None for number, does in zip(chunks, leaves, strict=True)]


@dataclass(frozen=True)
class PreparedRequest:
    """A request as it is sent. prompt_len: tokens, if the dataset knows them."""

    message: Message
    prompt_len: int | None
    leave_after: int | None = None


async def send(client: HttpClient, request: PreparedRequest, clock: Clock, timeout_s: float) -> Outcome:
    """Send one request and read its response. A failure is in the outcome, not raised."""
    outcome = Outcome(start=clock(), prompt_len=request.prompt_len)
    try:
        async with asyncio.timeout(timeout_s):
            await client.exchange(request.message, AnswerReader(outcome, request.leave_after))
    except ClientLeaves:
        outcome.status = Status.DISCONNECTED
    except RequestFailed as error:
        outcome.fail(error.cause, str(error))
        if outcome.http_status == 429:
            outcome.status = Status.REJECTED
    except ConnectionLost as error:
        outcome.fail("connection lost", str(error))
    except MalformedResponse as error:
        outcome.fail("malformed response", str(error))
    except TimeoutError:
        outcome.fail("timeout", f"no complete response within {timeout_s:g} s")
    except ConnectionRefusedError as error:
        outcome.fail("connection refused", str(error))
    except OSError as error:
        outcome.fail("no connection", str(error))
    outcome.end = clock()
    return outcome


async def run_load(
    client: HttpClient,
    requests: Sequence[PreparedRequest],
    arrivals: Sequence[float],
    settings: LoadSettings,
    clock: Clock,
    finished: Callable[[], object],
) -> list[Outcome]:
    """Send the requests at their arrivals, and return the outcomes in their order.

    finished: called after each request.
    """
    free = asyncio.Semaphore(settings.max_concurrency or len(requests))

    async def run(request: PreparedRequest) -> Outcome:
        try:
            return await send(client, request, clock, settings.request_timeout_s)
        finally:
            free.release()
            finished()

    begin = clock()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, arrival in zip(requests, arrivals, strict=True):
            if (wait_s := begin + arrival - clock()) > 0:
                await asyncio.sleep(wait_s)
            await free.acquire()
            tasks.append(group.create_task(run(request)))
    return [task.result() for task in tasks]
