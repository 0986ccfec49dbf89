"""Generation of one HTTP request: its prompts at the engine, their outputs, deadline and end.

This is the only place where requests of the HTTP API enter and leave the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from penstock.contract import Part, PoolingParams, RequestOutputKind, SamplingParams
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.inputs.field_limits import check_choices
from penstock.engine.inputs.prompts import Prompt, with_parts
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.stream_dispatcher import AdmittedRequest
from penstock.errors import InvalidParameter, InvalidRequest
from penstock.server.http.errors import ApiError
from penstock.server.requests.output_log import OutputLog
from penstock.server.tracing import NoTracing, RequestTrace

# Output of a prompt, after the prompt's number in its HTTP request.
Numbered: TypeAlias = tuple[int, RequestOutput]
# Prompts of one HTTP request that are tokenised without giving others their turn.
_SUBMITTED_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Submission:
    """Prompt for the engine. request_id: its name there. where: its name in errors, such as "prompt[3]"."""

    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int = 0
    where: str = ""


@dataclass(frozen=True, slots=True)
class PoolingSubmission:
    """Text for an engine that pools; as `Submission`."""

    prompt: Prompt
    params: PoolingParams
    request_id: str
    priority: int = 0
    where: str = ""


class Generation:
    """Outputs of an HTTP request's prompts, as an async context manager.

    output_kind: DELTA for streams, FINAL_ONLY for whole answers. timeout_s: deadline, after which the requests are
    aborted; their outputs end with finish_reason "abort". begin_s: the event loop's time from which it counts, None for
    that of `start`. parts: of all prompts. trace: gets the end of each prompt that was admitted. log: gets all outputs.

    `start` returns once the engine has admitted all prompts. Leaving the context aborts what still runs.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        submissions: Sequence[Submission | PoolingSubmission],
        *,
        output_kind: RequestOutputKind,
        timeout_s: float | None = None,
        begin_s: float | None = None,
        parts: Sequence[Part] = (),
        trace: RequestTrace | None = None,
        log: OutputLog | None = None,
    ) -> None:
        self._engine = engine
        self._submissions = submissions
        self._kind = output_kind
        self._timeout_s = timeout_s
        self._begin_s = begin_s
        self._parts = parts
        self._trace = trace or NoTracing()
        self._log = log
        # Outputs of the prompts that have not ended.
        self._last: dict[int, RequestOutput] = {}
        self._admitted: dict[int, AdmittedRequest] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._abort: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def start(self) -> None:
        """Submit the prompts, which have equal parameters.

        Raises InvalidParameter for too many choices, the engine's refusal of any prompt, or ApiError 408 if the
        deadline comes first.
        """
        params = self._submissions[0].params
        if isinstance(params, SamplingParams):
            check_choices([one.prompt for one in self._submissions], params.n, self._engine.request_limits)
        loop = asyncio.get_running_loop()
        begin_s = loop.time() if self._begin_s is None else self._begin_s
        end_s = None if self._timeout_s is None else begin_s + self._timeout_s
        try:
            async with asyncio.timeout_at(end_s) as timeout:
                await self._submit_all()
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError) and timeout.expired():
                raise self._expired() from None
            raise
        if end_s is not None:
            self._deadline = loop.call_at(end_s, self._expire)

    async def outputs(self) -> AsyncIterator[Numbered]:
        """Outputs in the order of their arrival.

        Raises InvalidRequest for a request that turns out not to be valid, ApiError for one that fails.
        """
        async for index, output in self._one() if len(self._submissions) == 1 else self._several():
            self._last[index] = output
            if self._log is not None:
                self._log.note(index, output)
            if output.finished:
                self._end_trace(index)
            if output.error is not None and output.is_invalid:
                raise InvalidRequest(output.error)
            if output.error is not None:
                raise ApiError(500, output.error, code="generation_failed")
            yield index, output

    async def finals(self) -> list[RequestOutput]:
        """Last output of each prompt. Raises as `outputs`, and ApiError for one whose deadline has passed."""
        last: dict[int, RequestOutput] = {}
        async for index, output in self.outputs():
            if self._abort is not None and any(sample.finish_reason == "abort" for sample in output.outputs):
                raise self._expired()
            last[index] = output
        return [last[index] for index in range(len(self._submissions))]

    @property
    def unread_bytes(self) -> int:
        """Estimated bytes of the outputs that `outputs` has not given."""
        return sum(request.unread_bytes for request in self._admitted.values())

    @property
    def has_finished(self) -> bool:
        """Whether the engine has finished all prompts."""
        return all(request.has_finished for request in self._admitted.values())

    def close(self) -> None:
        """Abort what still runs. A second call does nothing."""
        if self._deadline is not None:
            self._deadline.cancel()
        for request in self._admitted.values():
            request.close()
        for index in list(self._last):
            self._end_trace(index)

    def _end_trace(self, index: int) -> None:
        submission = self._submissions[index]
        self._trace.end(submission.request_id, submission.params, self._last.pop(index))

    async def _submit_all(self) -> None:
        if len(self._submissions) == 1:
            await self._submit(0)
            return
        params, rest = self._submissions[0].params, range(len(self._submissions))
        is_together = isinstance(params, SamplingParams)
        if isinstance(params, SamplingParams):
            # The queue admits or refuses all prompts with the first one.
            await self._submit(0, len(self._submissions) * params.n)
            rest = rest[1:]
        tasks: list[asyncio.Task[None]] = []
        try:
            for index in rest:
                tasks.append(asyncio.ensure_future(self._submit(index, 0 if is_together else 1)))
                if len(tasks) % _SUBMITTED_AT_ONCE == 0:
                    # Other requests have their turn, and the core begins, before all prompts are tokenised.
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _submit(self, index: int, num_choices: int = 1) -> None:
        submission = self._submissions[index]
        params: SamplingParams | PoolingParams = submission.params
        if isinstance(params, SamplingParams):
            params = params.with_fields(output_kind=self._kind)
        try:
            self._admitted[index] = await self._engine.submit(
                with_parts(submission.prompt, self._parts),
                params,
                submission.request_id,
                priority=submission.priority,
                num_choices=num_choices,
            )
        except InvalidParameter:
            # It is a parameter of all prompts.
            raise
        except InvalidRequest as error:
            if not submission.where:
                raise
            raise type(error)(f"{submission.where}: {error}") from error

    async def _one(self) -> AsyncGenerator[Numbered, None]:
        async for output in self._admitted[0]:
            yield 0, output

    async def _several(self) -> AsyncGenerator[Numbered, None]:
        # One place: the outputs of a slow reader wait in the engine, which merges them.
        inbox: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(1)
        tasks = [asyncio.create_task(_forward(index, self._admitted[index], inbox)) for index in self._admitted]
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
            await asyncio.wait(tasks)

    def _expire(self) -> None:
        request_ids = [submission.request_id for submission in self._submissions]
        self._abort = asyncio.get_running_loop().create_task(self._engine.abort(request_ids))
        # Readers of the outputs get the error of an engine that cannot abort.
        self._abort.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _expired(self) -> ApiError:
        # Clients would repeat a request with this status.
        headers = {"x-should-retry": "false"}
        message = f"The request was not answered within timeout={self._timeout_s:g} seconds."
        return ApiError(408, message, param="timeout", code="timeout", headers=headers)


async def _forward(index: int, request: AdmittedRequest, inbox: asyncio.Queue[Numbered | Exception | None]) -> None:
    """Put the outputs of a request into `inbox`: then its error, or None at its end."""
    try:
        async for output in request:
            await inbox.put((index, output))
    except Exception as error:
        await inbox.put(error)
    else:
        await inbox.put(None)
