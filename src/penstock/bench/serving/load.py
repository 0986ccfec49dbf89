"""Load on a server: when requests begin, how many are open at once, and how each of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.bench.serving.http import Clock, ConnectionLost, HttpClient, MalformedResponse, Message
from penstock.bench.serving.outcome import AnswerReader, ClientLeaves, Outcome, RequestFailed, Status
from penstock.bench.serving.settings import LoadSettings


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
