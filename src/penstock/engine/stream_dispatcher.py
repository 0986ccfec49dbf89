"""Streams of `AsyncEngine` between the core's thread, where requests are submitted, and their readers."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from penstock.engine.core.core_client import CoreClient
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.inputs.input_processor import AcceptedRequest
from penstock.engine.output.output_processor import OutputProcessor
from penstock.engine.output.output_stream import OutputStream, StreamLock
from penstock.engine.output.outputs import RequestOutput
from penstock.errors import PenstockError, same_error


class AdmittedRequest:
    """Outputs of a request that the core has admitted, to be read once: `async with request: async for ...`.

    Leaving the block, or `close`, aborts a request that has not ended.
    """

    def __init__(self, stream: OutputStream, close: Callable[[OutputStream], None]) -> None:
        self._stream = stream
        self._close = close

    @property
    def unread_bytes(self) -> int:
        """Estimated bytes of the output that was not read."""
        progress = self._stream.progress
        return 0 if progress is None or self._stream.is_over else progress.unread_bytes

    @property
    def has_finished(self) -> bool:
        """Whether the engine has finished the request, though its output may be unread."""
        progress = self._stream.progress
        return self._stream.is_over or (progress is not None and progress.finished)

    def close(self) -> None:
        """Abort the request if it has not ended. A second call does nothing."""
        self._close(self._stream)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._stream.is_over:
            raise StopAsyncIteration
        return await self._stream.next()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class StreamDispatcher(Dispatcher):
    """Dispatcher that also aborts requests of closed event loops, and forwards a remote core's refusals to readers."""

    _lock: StreamLock

    def __init__(self, core: CoreClient, processor: OutputProcessor, lock: StreamLock) -> None:
        super().__init__(core, processor, lock)
        core.on_admission(self._take_admission)

    def step(self) -> None:
        super().step()
        for stream in self._lock.take_orphans():
            abandon(self, stream)

    def _take_admission(self, core_id: str, error: PenstockError | None) -> None:
        with self._lock:
            request = self._processor.request_of(core_id)
            if request is None:
                return
            stream = request.inbox
            assert isinstance(stream, OutputStream), "its requests come from `AsyncEngine`"
            if error is None:
                stream.admit()
                return
            stream.fail(error)
        self.abandon([request.req_id], error)


def fail_all(lock: StreamLock, streams: set[OutputStream], error: PenstockError) -> None:
    """Raise an error in the readers of all streams."""
    with lock:
        for stream in streams:
            stream.fail(same_error(error))


def admit(dispatcher: Dispatcher, lock: StreamLock, stream: OutputStream, accepted: AcceptedRequest) -> None:
    """Submit a request to the core; its stream gets the error of a refusal."""
    try:
        stream.progress = dispatcher.admit(accepted.request, accepted.prompt, stream)
    except Exception as error:
        with lock:
            stream.fail(error)


def abandon(dispatcher: Dispatcher, stream: OutputStream) -> None:
    """Abort the stream's request if it runs; its id may belong to another request by now."""
    progress = stream.progress
    if progress is not None and not progress.finished:
        dispatcher.abandon([progress.req_id])
