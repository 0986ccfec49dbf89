"""Runner of batches: one at a time per front end, with calls of the server's own routes."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import ASGIApp

from penstock.server.batches.lines import answer_line
from penstock.server.batches.store import BatchStore
from penstock.server.http.inner_call import InnerResponse, post

logger = logging.getLogger(__name__)
# Interval at which a front end looks for batches, and one that runs a batch for its cancellation.
_POLL_S = 1.0
# Statuses of a server that is full, being repaired or about to end: the request is sent again.
_NOT_NOW = (429, 503)
_LONGEST_WAIT_S = 30.0


class BatchRunner:
    """Runner of a front end.

    app: the server's. api_key: one of its keys, if it has any. num_at_once: requests of a batch that run together.
    """

    def __init__(self, store: BatchStore, app: ASGIApp, *, api_key: str | None, num_at_once: int) -> None:
        self._store = store
        self._app = app
        self._api_key = api_key
        self._num_at_once = num_at_once
        self._task: asyncio.Task[None] | None = None

    def ensure_started(self) -> None:
        """Look for batches from now on, until the event loop ends."""
        if self._store.is_enabled and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._keep_running())

    async def _keep_running(self) -> None:
        while True:
            for id in await asyncio.to_thread(self._store.unfinished):
                try:
                    with self._store.claimed(id) as batch:
                        if batch is not None:
                            await self._run(batch)
                except Exception as error:
                    logger.error("The batch %s stopped, and is tried again: %s", id, error, exc_info=error)
            await asyncio.sleep(_POLL_S)

    async def _run(self, batch: dict[str, Any]) -> None:
        id, store = batch["id"], self._store
        if store.is_to_be_cancelled(id):
            await asyncio.to_thread(store.finish, batch, "cancelled")
            return
        if batch["status"] != "finalizing":
            requests, errors = await asyncio.to_thread(store.requests, batch)
            if errors:
                batch["errors"] = {"object": "list", "data": errors}
                await asyncio.to_thread(store.finish, batch, "failed")
                return
            is_whole = await self._answer_all(batch, requests)
            if not is_whole:
                await asyncio.to_thread(store.finish, batch, "cancelled")
                return
            batch |= {"status": "finalizing", "finalizing_at": int(time.time())}
            await asyncio.to_thread(store.save, batch)
        await asyncio.to_thread(store.finish, batch, "completed")

    async def _answer_all(self, batch: dict[str, Any], requests: list[dict[str, Any]]) -> bool:
        """Answer the requests that have no answer. Returns whether all have one: the batch was not cancelled."""
        id, store = batch["id"], self._store
        answered = await asyncio.to_thread(store.answered, id)
        counts = {kind: len(names) for kind, names in answered.items()}
        names = answered["output"] | answered["errors"]
        rest = iter([request for request in requests if request["custom_id"] not in names])
        batch |= {"status": "in_progress", "in_progress_at": batch["in_progress_at"] or int(time.time())}

        async def save() -> None:
            done = {"total": len(requests), "completed": counts["output"], "failed": counts["errors"]}
            if batch["request_counts"] != done:
                batch["request_counts"] = done
                await asyncio.to_thread(store.save, batch)

        await save()
        num_workers = min(self._num_at_once, len(requests))
        workers = [asyncio.ensure_future(self._answer_some(id, rest, counts)) for _ in range(num_workers)]
        try:
            while not all(worker.done() for worker in workers):
                done, _ = await asyncio.wait(workers, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
                for worker in done:
                    worker.result()
                await save()
                if store.is_to_be_cancelled(id):
                    return False
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return True

    async def _answer_some(self, id: str, rest: Iterator[dict[str, Any]], counts: dict[str, int]) -> None:
        for request in rest:
            response = await self._answer(request["url"], msgspec.json.encode(request["body"]))
            kind = "output" if response.status == 200 else "errors"
            line = answer_line(
                uuid.uuid4().hex,
                request["custom_id"],
                response.status,
                response.headers["X-Request-Id"],
                msgspec.Raw(response.body) if response.status == 200 else msgspec.json.decode(response.body),
            )
            await asyncio.to_thread(self._store.add_answer, id, kind, line)
            counts[kind] += 1

    async def _answer(self, url: str, body: bytes) -> InnerResponse:
        while True:
            response = await post(self._app, url, body, self._api_key)
            if response.status not in _NOT_NOW:
                return response
            wait_s = response.headers.get("Retry-After", "1")
            await asyncio.sleep(min(float(wait_s) if wait_s.isdecimal() else 1.0, _LONGEST_WAIT_S))
