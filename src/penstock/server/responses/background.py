"""Background responses: they run without a connection, and clients read them from the store."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from penstock.contract import RequestOutputKind
from penstock.server.http.errors import api_error
from penstock.server.requests.chat_task import ChatTask
from penstock.server.requests.generation import Generation
from penstock.server.responses.output import ResponseWriter
from penstock.server.responses.store import ResponseStore, StoredResponse
from penstock.server.served_model import ServedModel
from penstock.server.tracing import RequestTrace

logger = logging.getLogger(__name__)
# Interval at which a response that runs is looked up: it may be cancelled or deleted by another front end.
_POLL_S = 0.5


class BackgroundResponses:
    """Responses of this front end that run without a client.

    A response is stored as "in_progress" and locked while it runs. A request that stores another status, or deletes it,
    cancels it.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self,
        model: ServedModel,
        task: ChatTask,
        writer: ResponseWriter,
        stored: StoredResponse,
        *,
        timeout_s: float | None,
        trace: RequestTrace,
    ) -> None:
        """Begin a response: it is admitted by the engine, and stored.

        stored: as it is at its begin. Raises as `Generation`, and OSError if it cannot be stored.
        """
        generation = Generation(
            model.engine,
            [task.submission],
            output_kind=RequestOutputKind.FINAL_ONLY,
            timeout_s=timeout_s,
            parts=model.parts,
            trace=trace,
        )
        await generation.start()
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(self._run(generation, writer, stored, begun))
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)
        await begun

    async def _run(
        self, generation: Generation, writer: ResponseWriter, stored: StoredResponse, begun: asyncio.Future[None]
    ) -> None:
        id = stored.body["id"]
        answer = asyncio.ensure_future(_answer(generation, writer, id))
        try:
            with self._store.running(id):
                await asyncio.to_thread(self._store.put, stored)
                if not begun.done():
                    begun.set_result(None)
                while not answer.done():
                    await asyncio.wait({answer}, timeout=_POLL_S)
                    now = await asyncio.to_thread(self._store.get, id)
                    if now is None or now.body["status"] != "in_progress":
                        return
                await asyncio.to_thread(self._store.end, StoredResponse(answer.result(), stored.items))
        except OSError as error:
            logger.error("The response %s cannot be stored, and is cancelled: %s", id, error)
            if not begun.done():
                begun.set_exception(error)
        finally:
            answer.cancel()
            generation.close()


async def _answer(generation: Generation, writer: ResponseWriter, id: str) -> dict[str, Any]:
    """Body of the response at its end."""
    try:
        return await writer.whole(await generation.finals())
    except Exception as error:
        return writer.failed(api_error(error, id))


def cancelled(body: dict[str, Any]) -> dict[str, Any]:
    """Body of a response that was cancelled."""
    return {**body, "status": "cancelled", "completed_at": None}


def lost(body: dict[str, Any]) -> dict[str, Any]:
    """Body of a response whose front end has ended while it ran."""
    error = {"code": "server_error", "message": "The server ended while the response ran. Send the request again."}
    return {**body, "status": "failed", "error": error}
