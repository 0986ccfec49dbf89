"""The HTTP API as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from penstock.engine.async_engine import AsyncEngine
from penstock.errors import PenstockError
from penstock.server.audio import routes as audio
from penstock.server.batches import routes as batches
from penstock.server.batches.runner import BatchRunner
from penstock.server.batches.store import BatchStore
from penstock.server.http.body import body_model
from penstock.server.http.context import REQUEST_ID_HEADER, RequestContext, request_id_of
from penstock.server.http.errors import ApiError, api_error
from penstock.server.http.guards import ApiKeys, BodyLimits, UnreadBodies
from penstock.server.http.prefill_first import PrefillFirst
from penstock.server.http.unknown_fields import UnknownFields
from penstock.server.http.validation import validation_error
from penstock.server.ollama import routes as ollama
from penstock.server.options import ServerOptions
from penstock.server.page import route as page
from penstock.server.responses.background import BackgroundResponses
from penstock.server.responses.store import ResponseStore
from penstock.server.routes import (
    admin,
    chat,
    chat_batch,
    completions,
    invocations,
    messages,
    models,
    pooling,
    responses,
    sleep,
    tokenize,
    tokens,
    weights,
)
from penstock.server.served_model import ServedModel
from penstock.server.tei import routes as tei
from penstock.version import __version__


def create_app(engine: AsyncEngine, options: ServerOptions) -> FastAPI:
    """Application that serves the engine. It does not shut the engine down.

    Raises ConfigError for options that do not fit the model.
    """
    # A redirect to a path without its last slash would name this server rather than the proxy before it.
    app = FastAPI(title="Penstock", version=__version__, redirect_slashes=False)
    app.state.served_model = ServedModel(engine, options)
    app.state.request_limits = engine.request_limits
    app.state.large_bodies = asyncio.Lock()
    app.state.unknown_fields = UnknownFields(options.unknown_fields)
    app.state.response_store = ResponseStore(options)
    app.state.background_responses = BackgroundResponses(app.state.response_store)
    app.state.batch_store = BatchStore(options)
    app.state.batch_runner = BatchRunner(
        app.state.batch_store,
        app,
        api_key=next(iter(options.api_keys), None),
        # The others are left for requests whose clients wait.
        num_at_once=max(1, engine.config.scheduler.max_num_seqs // 2),
    )
    for module in (
        completions,
        chat,
        responses,
        messages,
        pooling,
        models,
        tokenize,
        tokens,
        chat_batch,
        invocations,
        audio,
        batches,
        ollama,
        tei,
    ):
        app.include_router(module.router)
    if options.page:
        app.include_router(page.router)
    for router in (admin.router, sleep.router, weights.router):
        app.include_router(_part(router, options.serves_admin_path))
        refused = _refused(_part(router, lambda path: not options.serves_admin_path(path)))
        app.include_router(refused, include_in_schema=False)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(PenstockError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    # The last one added is the outermost.
    if options.prefill_url is not None:
        app.add_middleware(PrefillFirst, url=options.prefill_url, min_bytes=options.prefill_min_bytes)
    app.add_middleware(
        BodyLimits,
        max_bytes=options.max_request_bytes,
        max_open_bytes=options.max_open_request_bytes,
        timeout_s=options.request_read_timeout_s,
    )
    app.add_middleware(UnreadBodies, timeout_s=options.request_read_timeout_s)
    app.add_middleware(
        ApiKeys,
        keys=options.api_keys,
        admin_key=options.admin_api_key,
        opens_rl_paths=options.rl_routes_without_key,
    )
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=(REQUEST_ID_HEADER,),
        )
    app.add_middleware(RequestContext, root_path=options.root_path, logs_requests=options.enable_log_requests)
    app.openapi = lambda: _openapi(app, options.root_path)  # type: ignore[method-assign]
    return app


def _part(router: APIRouter, is_in: Callable[[str], bool]) -> APIRouter:
    """Routes of a router by their paths."""
    part = APIRouter()
    part.routes.extend(route for route in router.routes if isinstance(route, APIRoute) and is_in(route.path))
    return part


def _refused(router: APIRouter) -> APIRouter:
    """Routes of the engine's administration that say why they are not there."""

    async def refuse(http: Request) -> Response:
        raise ApiError(404, f"{http.url.path} is there with --enable-admin and --admin-api-key only.")

    refused = APIRouter()
    for route in router.routes:
        assert isinstance(route, APIRoute)
        refused.add_api_route(route.path, refuse, methods=list(route.methods or ()))
    return refused


async def _on_error(http: Request, error: Exception) -> Response:
    return api_error(error, request_id_of(http.scope)).response(http.scope)


async def _on_invalid_body(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    model = body_model(http)
    fields = [] if model is None else list(model.model_fields)
    return validation_error(error.errors(), error.body, fields).response(http.scope)


def _openapi(app: FastAPI, root_path: str) -> dict[str, Any]:
    """OpenAPI document, without FastAPI's status 422: invalid requests get 400 here."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, routes=app.routes, servers=[{"url": root_path or "/"}]
        )
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = document
    return app.openapi_schema
