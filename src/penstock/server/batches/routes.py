"""Routes `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import field_validator
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse, Response

from penstock.server.batches.runner import BatchRunner
from penstock.server.batches.store import FINAL, UNFINISHED, BatchStore
from penstock.server.http.body import BodyRoute
from penstock.server.http.errors import ApiError, json_response
from penstock.server.protocol.base import RequestModel, field_error
from penstock.server.protocol.responses import errors, form_of_file
from penstock.server.routes.common import list_page

router = APIRouter(route_class=BodyRoute)
_ERRORS = errors(400, 401, 404, 413, 500)
_FILE = {200: {"description": "The file's description."}, **_ERRORS}
_BATCH = {200: {"description": "The batch."}, **_ERRORS}
_LIST = {200: {"description": "A page of the list."}, **_ERRORS}
_FORM = form_of_file({"purpose": {"type": "string", "enum": ["batch"]}}, "purpose")
_Limit = Annotated[int, Query(ge=1, le=10_000)]
_MOST_FIELDS = 16
# Seconds of a window's units.
_UNITS = {"h": 3600, "d": 86_400}


class CreateBatchRequest(RequestModel):
    """Request of a batch. completion_window: time after which requests without an answer expire."""

    input_file_id: str
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"
    ]
    completion_window: str
    metadata: dict[str, str] | None = None

    @property
    def window_s(self) -> int:
        """Seconds of completion_window."""
        return int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]

    @field_validator("completion_window")
    @classmethod
    def _check_window(cls, window: str) -> str:
        if re.fullmatch(r"[1-9]\d{0,3}[hd]", window, re.ASCII) is None:
            message = f"completion_window={window!r} is not valid. Allowed: hours or days, such as '24h' or '7d'."
            raise field_error("completion_window", message)
        return window


@router.post("/v1/files", responses=_FILE, openapi_extra=_FORM)
async def upload_file(http: Request) -> Response:
    """Store a file of requests, a line each, for a batch."""
    kind = http.headers.get("Content-Type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise ApiError(400, f"The Content-Type is {kind!r}. Allowed: multipart/form-data with a boundary.")
    # The file is on the disk beyond 1 MiB.
    async with http.form(max_files=1, max_fields=_MOST_FIELDS) as form:
        for name in form.keys() - {"file", "purpose"}:
            raise ApiError(400, f"There is no field {name}. Allowed: file, purpose.", param=name)
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "file is missing.", param="file")
        if purpose != "batch":
            raise ApiError(400, f"purpose={purpose!r} is not available. Allowed: 'batch'.", param="purpose")
        add, name = _store(http).add_file, file.filename or "file"
        return json_response(await asyncio.to_thread(add, file.file, file.size or 0, name))


@router.get("/v1/files", responses=_LIST)
async def list_files(
    http: Request,
    limit: _Limit = 10_000,
    after: str | None = None,
    purpose: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Stored files, those of batches' answers included."""
    files = [one for one in await asyncio.to_thread(_store(http).files) if purpose in (None, one["purpose"])]
    return list_page(files if order == "desc" else files[::-1], limit, after)


@router.get("/v1/files/{id}", responses=_FILE)
async def retrieve_file(id: str, http: Request) -> Response:
    """Description of a file."""
    return json_response(await asyncio.to_thread(_store(http).file, id))


@router.get("/v1/files/{id}/content", responses={200: {"description": "The content."}, **_ERRORS})
async def file_content(id: str, http: Request) -> Response:
    """Content of a file."""
    return FileResponse(await asyncio.to_thread(_store(http).content, id), media_type="application/octet-stream")


@router.delete("/v1/files/{id}", responses=_FILE)
async def delete_file(id: str, http: Request) -> Response:
    """Delete a file."""
    await asyncio.to_thread(_store(http).delete_file, id)
    return json_response({"id": id, "object": "file", "deleted": True})


@router.post("/v1/batches", responses=_BATCH)
async def create_batch(request: CreateBatchRequest, http: Request) -> Response:
    """Answer the requests of a file, as soon as there is room."""
    store = _store(http)
    try:
        await asyncio.to_thread(store.file, request.input_file_id)
    except ApiError as error:
        raise ApiError(error.status_code, error.message, param="input_file_id", code=error.code) from error
    now = int(time.time())
    batch = {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        "endpoint": request.endpoint,
        "errors": None,
        "input_file_id": request.input_file_id,
        "completion_window": request.completion_window,
        "status": UNFINISHED[0],
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + request.window_s,
        **dict.fromkeys(f"{status}_at" for status in ("in_progress", "finalizing", *FINAL)),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": request.metadata,
    }
    await asyncio.to_thread(store.save, batch)
    return json_response(batch)


@router.get("/v1/batches", responses=_LIST)
async def list_batches(http: Request, limit: _Limit = 20, after: str | None = None) -> Response:
    """Stored batches, the newest first."""
    return list_page(await asyncio.to_thread(_store(http).batches), limit, after)


@router.get("/v1/batches/{id}", responses=_BATCH)
async def retrieve_batch(id: str, http: Request) -> Response:
    """A batch, with its status and the files of its answers."""
    return json_response(await asyncio.to_thread(_store(http).batch, id))


@router.post("/v1/batches/{id}/cancel", responses=_BATCH)
async def cancel_batch(id: str, http: Request) -> Response:
    """Cancel a batch: requests that run are aborted, and the answers so far stay."""
    store = _store(http)
    batch = await asyncio.to_thread(store.batch, id)
    if batch["status"] not in (*UNFINISHED, "cancelling"):
        raise ApiError(400, f"The batch {id!r} has ended: it is {batch['status']}.")
    await asyncio.to_thread(store.cancel, id)
    return json_response(await asyncio.to_thread(store.batch, id))


def _store(http: Request) -> BatchStore:
    """Store of the server. Raises ApiError without a folder."""
    store: BatchStore = http.app.state.batch_store
    runner: BatchRunner = http.app.state.batch_runner
    _ = store.folder
    runner.ensure_started()
    return store
