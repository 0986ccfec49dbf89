"""Front end: process that serves HTTP, as a client of the broker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI

from penstock.config import EngineConfig
from penstock.config.queue import QueueLimits
from penstock.contract import decode
from penstock.device.host_allocator import FREED_MEMORY, GIVE_BACK
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.live.live_view import LiveView
from penstock.engine.messages import CoreBusy, FrontEnded, FrontStarted, ToFront
from penstock.engine.processes.broker_connection import BrokerState, connect_to_broker
from penstock.engine.processes.child_main import ParentConnection
from penstock.server.app import create_app
from penstock.server.http.client_connections import (
    ClientConnections,
    ConnectionLimits,
    PacedListener,
    connections_of_limit,
)
from penstock.server.http.client_protocol import client_protocol
from penstock.server.http.loop_errors import LoopErrors
from penstock.server.metrics import route as metrics_route
from penstock.server.metrics.expert_tokens import ExpertTokens
from penstock.server.metrics.front_end_metrics import FrontEndMetrics
from penstock.server.metrics.http_requests import CountRequests, HttpCounts
from penstock.server.options import ServerOptions
from penstock.server.page import live
from penstock.server.processes import health
from penstock.server.processes.network import NetworkOptions
from penstock.server.start_checks import check_start

logger = logging.getLogger(__name__)
_HEARTBEAT_S = 1.0
# Interval at which a front end looks whether its engine lives.
_HEALTH_POLL_S = 1.0
# Interval at which a draining front end looks whether its requests have ended.
_DRAIN_POLL_S = 0.02
# Time for the last bytes of responses after the drain.
_LAST_BYTES_S = 5.0


@dataclass(frozen=True, slots=True)
class FrontEndArguments:
    """Arguments of a front end's process.

    limits: those of the broker's queue.
    number: number among all front ends ever started. folder: has the broker's Unix socket, and the metrics of all
    processes. descriptor: listening socket for HTTP. step_limit_s, silence_limit_s: see
    `Health`.
    """

    config: EngineConfig
    options: ServerOptions
    network: NetworkOptions
    limits: QueueLimits
    number: int
    folder: Path
    descriptor: int
    step_limit_s: float
    silence_limit_s: float


def serve_http(arguments: FrontEndArguments, parent: ParentConnection) -> None:
    """Connect to the broker and serve HTTP, until the parent drains the front end or closes its connection."""
    # Its threads decode media: what each frees would stay in an arena of its own.
    FREED_MEMORY.want(serve_http, GIVE_BACK)
    check_start(arguments.options, arguments.config)
    broker = BrokerState()
    engine = AsyncEngine.from_config(
        arguments.config,
        lambda config: connect_to_broker(str(broker_path(arguments.folder)), config, broker),
        front_end=arguments.number,
    )
    logging.getLogger("uvicorn").addHandler(_UvicornLog())
    try:
        app = create_app(engine, arguments.options)
        tracing = app.state.served_model.tracing
        state = health.Health(broker, arguments.step_limit_s, arguments.silence_limit_s)
        app.state.health = state
        app.include_router(health.router)
        app.add_middleware(health.Drainage, health=state)
        metrics = _add_metrics(app, engine, state, arguments)
        _add_live_view(app, engine, state, metrics, arguments)
        connections, listener = _connections(arguments)
        app.add_middleware(ConnectionLimits, connections=connections, why_full=_why_full(arguments, state))
        http = client_protocol(arguments.options.request_read_timeout_s, connections)
        front_end = _FrontEnd(engine, app, state, metrics, arguments.network, http, listener, parent)
        asyncio.run(front_end.run())
        tracing.close()
    finally:
        engine.shutdown()


def _connections(arguments: FrontEndArguments) -> tuple[ClientConnections, PacedListener]:
    """Connections of this front end, as many as it may have files, and the socket that gives them."""
    listener = PacedListener(fileno=arguments.descriptor)
    most, listener.most_at_once = connections_of_limit(psutil.Process().num_fds())
    options = arguments.options
    connections = ClientConnections(
        write_timeout_s=options.response_write_timeout_s,
        max_unread_bytes=options.max_unread_response_bytes,
        max_connections=most,
    )
    listener.connections = connections
    return connections, listener


def _why_full(arguments: FrontEndArguments, state: health.Health) -> Callable[[int], str | None]:
    """Function that says why the queue has no room while a number of finished answers is unread."""
    limit, max_num_seqs = arguments.limits.max_num_queued_requests, arguments.config.scheduler.max_num_seqs

    def why(num_unread: int) -> str | None:
        status = state.status
        if (
            limit is None
            or status is None
            or status.num_requests + num_unread < limit + status.num_engines * max_num_seqs
        ):
            return None
        return (
            f"{status.num_requests} requests run or are queued, the answers of {num_unread} others are unread, and "
            f"max_num_queued_requests={limit}"
        )

    return why


def broker_path(folder: Path) -> Path:
    """Path of the broker's Unix socket in the folder that the server's processes share."""
    return folder / "broker"


def _add_metrics(
    app: FastAPI, engine: AsyncEngine, state: health.Health, arguments: FrontEndArguments
) -> FrontEndMetrics:
    counts = HttpCounts()
    app.state.metrics = metrics = FrontEndMetrics(
        engine,
        state,
        counts,
        arguments.folder,
        number=arguments.number,
        model_name=arguments.options.served_model_name[0],
        max_num_seqs=arguments.config.scheduler.max_num_seqs,
        block_size=arguments.config.cache.block_size,
        experts=ExpertTokens(engine, state) if arguments.config.expert_stats.expert_stats else None,
    )
    app.include_router(metrics_route.router)
    app.add_middleware(CountRequests, counts=counts)
    return metrics


def _add_live_view(
    app: FastAPI, engine: AsyncEngine, state: health.Health, metrics: FrontEndMetrics, arguments: FrontEndArguments
) -> None:
    app.state.live_view = LiveView(
        live.ServerState(engine, state, metrics),
        model_name=arguments.options.served_model_name[0],
        max_num_seqs=arguments.config.scheduler.max_num_seqs,
    )
    app.include_router(live.router)


class _FrontEnd:
    def __init__(
        self,
        engine: AsyncEngine,
        app: FastAPI,
        state: health.Health,
        metrics: FrontEndMetrics,
        network: NetworkOptions,
        http: type[asyncio.Protocol],
        listener: socket.socket,
        parent: ParentConnection,
    ) -> None:
        self._engine = engine
        self._health = state
        self._batches = app.state.batch_runner
        self._metrics = metrics
        self._listener = listener
        self._parent = parent
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=int(network.timeout_keep_alive),
                timeout_graceful_shutdown=int(_LAST_BYTES_S),
                http=http,
                ws="none",
                ssl_certfile=network.ssl_certfile,
                ssl_keyfile=network.ssl_keyfile,
                ssl_keyfile_password=network.ssl_keyfile_password,
                ssl_ca_certs=network.ssl_ca_certs,
                ssl_cert_reqs=network.ssl_cert_reqs,
            ),
            lambda: parent.send(FrontStarted()),
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        drain: asyncio.Future[Any] = loop.create_future()

        def read() -> None:
            timeout_s = _read_drain(self._parent)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(drain.set_result, timeout_s)

        threading.Thread(target=read, name="penstock-parent", daemon=True).start()
        tasks = [asyncio.create_task(self._metrics.keep_written()), asyncio.create_task(self._send_heartbeats())]
        self._batches.ensure_started()
        serving: asyncio.Future[Any] = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        while not (serving.done() or drain.done()):
            await asyncio.wait({serving, drain}, timeout=_HEALTH_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            # A front end whose client of the broker has ended is started again.
            await self._engine.check_health()
        if drain.done():
            await self._drain(drain.result())
            self._server.should_exit = True
        await serving
        for task in tasks:
            task.cancel()

    async def _send_heartbeats(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._parent.send(CoreBusy())
            await asyncio.sleep(_HEARTBEAT_S)

    async def _drain(self, timeout_s: float) -> None:
        """Refuse new requests, and abort those that have not finished in time."""
        self._health.is_draining = True
        deadline = time.monotonic() + timeout_s
        while self._engine.get_num_unfinished_requests() and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        num_left = self._engine.get_num_unfinished_requests()
        if num_left:
            logger.warning("%d requests have not finished within %g s and are aborted", num_left, timeout_s)
            await self._engine.abort_all()
        with contextlib.suppress(OSError):
            self._parent.send(FrontEnded(num_aborted=num_left))


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers. on_start: called once it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _UvicornLog(logging.Handler):
    """Handler that writes uvicorn's log records to Penstock's log."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.log(record.levelno, "%s", record.getMessage(), exc_info=record.exc_info)


def _read_drain(parent: ParentConnection) -> float:
    """Wait for the parent to drain the front end. Returns the timeout: 0 at the end of the connection."""
    try:
        return decode(parent.receive(), ToFront).message.timeout_s
    except (EOFError, OSError):
        return 0.0
