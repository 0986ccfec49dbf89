"""Generation of one HTTP request: its prompts at the engine, their outputs, deadline and end.

This is the only place where requests of the HTTP API enter and leave the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from penstock.contract import RequestOutputKind, SamplingParams
from penstock.engine.outputs import RequestOutput
from penstock.engine.prompts import Prompt
from penstock.errors import PenstockError
from penstock.server.errors import ApiError
from penstock.server.served_model import ServedModel

# Output of a prompt, after the prompt's number in its HTTP request.
Numbered: TypeAlias = tuple[int, RequestOutput]
# Seconds between attempts to abort an expired request, which the engine may not know yet at the first one.
_ABORT_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt for the engine. request_id: its name there."""

    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int = 0


class Generation:
    """Outputs of an HTTP request's prompts, as an async context manager and iterator.

    output_kind: DELTA for streams, FINAL_ONLY for whole answers. timeout_s: deadline, after which the requests are
    aborted; their outputs end with finish_reason "abort".

    `start` returns once the engine has admitted the request: until the engine acknowledges that, at its first output.
    Leaving the context aborts what still runs.
    """

    def __init__(
        self,
        model: ServedModel,
        submissions: Sequence[Submission],
        *,
        output_kind: RequestOutputKind,
        timeout_s: float | None = None,
    ) -> None:
        self._model = model
        self._submissions = submissions
        self._kind = output_kind
        self._timeout_s = timeout_s
        self._outputs = self._one() if len(submissions) == 1 else self._several()
        self._first: Numbered | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._has_expired = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Wait for the first output. Raises the engine's refusal, or ApiError 408 if the deadline comes first."""
        if self._timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        try:
            self._first = await anext(self._outputs)
            self._check_deadline(self._first[1])
        except BaseException:
            await self.close()
            raise

    async def outputs(self) -> AsyncIterator[Numbered]:
        """Outputs in the order of their arrival. Raises ApiError for a request that fails."""
        assert self._first is not None, "`start` comes first"
        _check_success(self._first[1])
        yield self._first
        async for numbered in self._outputs:
            _check_success(numbered[1])
            yield numbered

    async def finals(self) -> list[RequestOutput]:
        """Last output of each prompt. Raises ApiError for a request that fails, or whose deadline has passed."""
        last: dict[int, RequestOutput] = {}
        async for index, output in self.outputs():
            self._check_deadline(output)
            last[index] = output
        return [last[index] for index in range(len(self._submissions))]

    async def close(self) -> None:
        """Abort what still runs. A second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
        await self._outputs.aclose()

    def _one(self) -> AsyncGenerator[Numbered, None]:
        return self._outputs_of(0)

    async def _outputs_of(self, index: int) -> AsyncGenerator[Numbered, None]:
        submission = self._submissions[index]
        outputs = self._model.generate(
            submission.prompt,
            submission.params,
            submission.request_id,
            priority=submission.priority,
            output_kind=self._kind,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield index, output

    async def _several(self) -> AsyncGenerator[Numbered, None]:
        # One place: the outputs of a slow reader wait in the engine, which merges them.
        inbox: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(1)
        tasks = [asyncio.create_task(self._forward(index, inbox)) for index in range(len(self._submissions))]
        try:
            num_running = len(tasks)
            while num_running:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, index: int, inbox: asyncio.Queue[Numbered | Exception | None]) -> None:
        try:
            async with aclosing(self._outputs_of(index)) as outputs:
                async for numbered in outputs:
                    await inbox.put(numbered)
        except Exception as error:
            await inbox.put(error)
        else:
            await inbox.put(None)

    def _expire(self) -> None:
        self._has_expired = True
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        self._timer = loop.call_later(_ABORT_INTERVAL_S, self._expire)

    async def _abort(self) -> None:
        # The readers get the error of an engine that has ended.
        with suppress(PenstockError):
            await self._model.engine.abort([submission.request_id for submission in self._submissions])

    def _check_deadline(self, output: RequestOutput) -> None:
        if self._has_expired and any(completion.finish_reason == "abort" for completion in output.outputs):
            # Clients would repeat a request with this status.
            headers = {"x-should-retry": "false"}
            message = f"The request was not answered within timeout={self._timeout_s:g} seconds."
            raise ApiError(408, message, param="timeout", code="timeout", headers=headers)


def _check_success(output: RequestOutput) -> None:
    if output.error is not None:
        raise ApiError(500, output.error, code="generation_failed")
