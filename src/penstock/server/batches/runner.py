"""Runner of batches: one at a time per front end, with calls of the server's own routes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import ASGIApp

from penstock.server.batches.lines import answer_line
from penstock.server.batches.store import BatchStore, batch_error
from penstock.server.http.errors import without_folders
from penstock.server.http.inner_call import InnerResponse, post

logger = logging.getLogger(__name__)
# Interval at which a front end looks for batches, and one that runs a batch for its cancellation.
_POLL_S = 1.0
# Statuses of a server that is full, being repaired or about to end: the request is sent again.
_NOT_NOW = (429, 503)
_LONGEST_WAIT_S = 30.0
# Pauses after which a batch that stopped is tried again; then it fails.
_PAUSES_S = (1.0, 10.0, 60.0, 300.0)


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
        # Number of failures of a batch, and the time from which it is tried again.
        self._failures: dict[str, tuple[int, float]] = {}

    def ensure_started(self) -> None:
        """Look for batches from now on, until the event loop ends."""
        if self._store.is_enabled and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._keep_running())

    async def _keep_running(self) -> None:
        while True:
            try:
                ids = await asyncio.to_thread(self._store.unfinished)
            except Exception as error:
                logger.error("The batches cannot be read, and are tried again in %g s", _LONGEST_WAIT_S, exc_info=error)
                await asyncio.sleep(_LONGEST_WAIT_S)
                continue
            self._failures = {id: self._failures[id] for id in ids if id in self._failures}
            for id in ids:
                num_failures, resume_s = self._failures.get(id, (0, 0.0))
                if time.monotonic() < resume_s:
                    continue
                try:
                    with self._store.claimed(id) as batch:
                        if batch is not None:
                            await self._run(batch)
                except Exception as error:
                    await self._note_failure(id, num_failures, error)
            await asyncio.sleep(_POLL_S)

    async def _note_failure(self, id: str, num_failures: int, error: Exception) -> None:
        """Have a batch that stopped tried again after a pause, or end it: what stops it each time will not change."""
        if num_failures < len(_PAUSES_S):
            pause_s = _PAUSES_S[num_failures]
            logger.error("The batch %s stopped, and is tried again in %g s: %s", id, pause_s, error, exc_info=error)
            self._failures[id] = (num_failures + 1, time.monotonic() + pause_s)
            return
        logger.error("The batch %s stopped %d times, and fails: %s", id, num_failures + 1, error, exc_info=error)
        # A folder that cannot be written keeps the batch as it is, for the next server.
        self._failures[id] = (num_failures + 1, math.inf)
        cause = f"{type(error).__name__}: {without_folders(str(error))}"
        reason = f"The server cannot run the batch: it stopped {num_failures + 1} times, the last time by {cause}"
        with suppress(Exception), self._store.claimed(id) as batch:
            if batch is not None:
                await asyncio.to_thread(self._store.fail, batch, [batch_error(None, reason)])

    async def _run(self, batch: dict[str, Any]) -> None:
        id, store = batch["id"], self._store
        if store.is_to_be_cancelled(id):
            await asyncio.to_thread(store.finish, batch, "cancelled")
            return
        if batch["status"] != "finalizing":
            requests, errors = await asyncio.to_thread(store.requests, batch)
            if errors:
                await asyncio.to_thread(store.fail, batch, errors)
                return
            end = await self._answer_all(batch, requests)
            if end == "expired":
                await asyncio.to_thread(store.add_expired, batch, requests)
            if end != "completed":
                await asyncio.to_thread(store.finish, batch, end)
                return
            batch |= {"status": "finalizing", "finalizing_at": int(time.time())}
            await asyncio.to_thread(store.save, batch)
        await asyncio.to_thread(store.finish, batch, "completed")

    async def _answer_all(self, batch: dict[str, Any], requests: list[dict[str, Any]]) -> str:
        """Answer the requests that have no answer. Returns the status that the batch ends with."""
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
                if store.is_to_be_cancelled(id):
                    return "cancelled"
                if time.time() >= batch["expires_at"]:
                    return "expired"
                done, _ = await asyncio.wait(workers, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
                for worker in done:
                    worker.result()
                await save()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return "completed"

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
        least_s = 1.0
        while True:
            response = await post(self._app, url, body, self._api_key)
            if response.status not in _NOT_NOW:
                return response
            wait_s = response.headers.get("Retry-After", "")
            await asyncio.sleep(min(max(least_s, float(wait_s) if wait_s.isdecimal() else 0.0), _LONGEST_WAIT_S))
            least_s *= 2
