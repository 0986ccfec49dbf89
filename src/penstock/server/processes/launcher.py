"""Launcher: starts and supervises the broker and the front ends of a server, and ends them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import queue
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from penstock.config import EngineConfig
from penstock.config.queue import QueueLimits
from penstock.contract import encode
from penstock.engine.messages import (
    BrokerStatus,
    CloseCore,
    CoreMessage,
    CoreStarted,
    Drain,
    FeaturesChanged,
    FrontEnded,
    FrontStarted,
    ToCore,
    ToFront,
)
from penstock.engine.processes.broker import BrokerArguments, serve_fronts
from penstock.engine.processes.child_process import ChildProcess
from penstock.engine.processes.supervised_process import Deliver, SupervisedProcess
from penstock.errors import ConfigError, PenstockError
from penstock.executor.processes import ProcessStarter
from penstock.server.http.guards import RL_PATHS
from penstock.server.metrics.history import ServerHistory
from penstock.server.metrics.launcher_metrics import LauncherMetrics
from penstock.server.options import ServerOptions
from penstock.server.processes.front_end import FrontEndArguments, broker_path, serve_http
from penstock.server.processes.network import NetworkOptions
from penstock.server.processes.start_stages import StartStages
from penstock.system.temporary_folder import TemporaryFolder
from penstock.worker.capabilities import check_async_engine, check_options

logger = logging.getLogger(__name__)
_SEND_TIMEOUT_S = 30.0
# Longest time without a heartbeat of a broker or front end that works: they send one a second at least, also while
# cores compute.
_LONGEST_SILENCE_S = 30.0
# Time in which a process that hangs is noticed and killed, before which front ends do not call the server dead.
_REPLACING_S = 5.0
# Grace period of the broker, which closes its cores.
_BROKER_GRACE_S = 30.0
# Time of a front end after its drain, for the last bytes and its exit.
_FRONT_GRACE_S = 10.0
# Time in which a broker that has closed its cores exits.
_EXIT_S = 1.0

# Signals this close are one: `timeout` sends its signal to the process and again to its group.
_ONE_SIGNAL_S = 0.1

# A process that has started (by its name), an error that ends the server, or the number of a signal.
_Event: TypeAlias = "str | PenstockError | int"
_Start: TypeAlias = Callable[[Deliver], ChildProcess]


class Launcher:
    """Runs a server: one broker, and front ends that share the listening socket.

    A lost broker or front end is started again; requests survive the loss of the broker.

    began: start of the server, before its configuration was made, in monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        network: NetworkOptions,
        limits: QueueLimits,
        *,
        began: float,
    ) -> None:
        check_options(config)
        check_async_engine(config)
        self._config = config
        self._options = options
        self._network = network
        self._limits = limits
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        # States of features in the broker, which the next broker gets.
        self._features: bytes | None = None
        self._signal_time = -math.inf
        self._ends_at_once = False
        self._front_numbers = itertools.count()
        self._stages = StartStages(began)
        self._stages.end("configuration")
        parallel = config.parallel
        # A core without a step for this long is replaced by the broker.
        self._step_limit_s = parallel.step_timeout_s + (0.0 if parallel.executor == "uni" else parallel.longest_step_s)
        self._silence_limit_s = min(_LONGEST_SILENCE_S, self._step_limit_s)

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP; a second one ends it at once.

        Raises ConfigError when the address cannot be had; what starting the engine raises; EngineDead when the engine
        has failed for good.
        """
        if not (self._network.is_local or self._options.api_keys):
            logger.warning(
                "host=%s lets every machine that reaches it use this server, since there is no api_key",
                self._network.host,
            )
        if self._options.rl_routes_without_key:
            self._check_rl_routes()
        self._network.check_certificates()
        _raise_open_files_limit()
        handlers = {number: signal.signal(number, self._on_signal) for number in _ending_signals()}
        temporary = TemporaryFolder("penstock-")
        folder = temporary.path
        if self._options.response_store_dir is None:
            self._options = dataclasses.replace(self._options, response_store_dir=str(folder / "responses"))
        starter = ProcessStarter()
        try:
            with self._network.listening() as http, socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(broker_path(folder)))
                listener.listen()
                self._metrics = LauncherMetrics(folder, self._network.api_server_count)
                self._history = ServerHistory(
                    folder,
                    max_num_seqs=self._config.scheduler.max_num_seqs,
                    logs=not self._options.disable_log_stats,
                )
                self._serve(folder, http, listener, starter)
        finally:
            starter.close()
            temporary.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _check_rl_routes(self) -> None:
        """Say which routes need no key. Raises ConfigError where other machines could reach them."""
        if not self._network.is_local:
            raise ConfigError(
                f"rl_routes_without_key lets programs of this machine change the engine without a key, and host="
                f"{self._network.host} lets others connect. Listen on loopback (--host 127.0.0.1), or leave it out and "
                "send the key of --enable-admin."
            )
        logger.warning(
            "rl_routes_without_key: every program of this machine may call these routes without a key: %s",
            ", ".join(sorted(RL_PATHS)),
        )

    def _serve(self, folder: Path, http: socket.socket, listener: socket.socket, starter: ProcessStarter) -> None:
        broker = self._start_broker(listener, starter)
        fronts: list[SupervisedProcess] = []
        try:
            for _ in range(self._network.api_server_count):
                fronts.append(self._start_front(folder, http, starter))
            self._wait_for_start([broker, *fronts], self._network.url(http))
            while True:
                event = self._events.get()
                if isinstance(event, PenstockError):
                    raise event
                if isinstance(event, int):
                    self._drain(fronts)
                    return
        finally:
            # Front ends that outlived the broker would report its loss.
            for front in fronts:
                front.close()
            self._end_broker(broker)

    def _wait_for_start(self, processes: list[SupervisedProcess], url: str) -> None:
        while not all(process.has_started for process in processes):
            event = self._events.get()
            if isinstance(event, PenstockError):
                raise event
            if isinstance(event, int):
                self._events.put(event)
                return
            logger.info("%s started after %.1f s", event, self._stages.whole_s)
        self._stages.end("HTTP")
        logger.info("Start: %s", self._stages.described())
        logger.info("Ready after %.1f s: %s serves %s", self._stages.whole_s, url, self._names())

    def _drain(self, fronts: list[SupervisedProcess]) -> None:
        """Let running requests finish; front ends that are being started have none, and listen to nothing yet."""
        timeout_s = self._network.shutdown_timeout
        running = [front for front in fronts if front.is_running]
        if running:
            logger.info("Shutting down: running requests have %g s to finish", timeout_s)
        else:
            logger.info("Shutting down")
        for front in fronts:
            front.expect_end()
            if front in running:
                front.send(encode(ToFront(Drain(timeout_s=timeout_s))))
        self._wait_for_end(running, timeout_s + _FRONT_GRACE_S)

    def _end_broker(self, broker: SupervisedProcess) -> None:
        """Let a broker close its cores. A broker that is being started is killed, and its cores with it."""
        broker.expect_end()
        has_started = broker.is_running
        if has_started:
            broker.send(encode(ToCore(CloseCore())))
            self._wait_for_end([broker], _BROKER_GRACE_S)
        broker.close(_EXIT_S if has_started and not self._ends_at_once else 0.0)

    def _wait_for_end(self, processes: list[SupervisedProcess], timeout_s: float) -> None:
        """Wait until processes have ended, for `timeout_s` at most, or until a further signal."""
        deadline = time.monotonic() + timeout_s
        while not self._ends_at_once and not all(one.wait(0.0) for one in processes) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                if isinstance(self._events.get(timeout=0.05), int):
                    logger.warning("Ending at once, after a further signal")
                    self._ends_at_once = True

    def _start_broker(self, listener: socket.socket, starter: ProcessStarter) -> SupervisedProcess:
        descriptor = listener.fileno()

        def start(deliver: Deliver) -> ChildProcess:
            arguments = BrokerArguments(self._config, self._limits, descriptor, features=self._features)
            self._metrics.note_start("broker")
            return ChildProcess(
                serve_fronts,
                arguments,
                starter,
                deliver,
                role="broker",
                send_timeout_s=_SEND_TIMEOUT_S,
                descriptors=[descriptor],
            )

        return self._supervise("The broker", start, heartbeat_timeout_s=self._silence_limit_s)

    def _start_front(self, folder: Path, http: socket.socket, starter: ProcessStarter) -> SupervisedProcess:
        descriptor = http.fileno()

        def start(deliver: Deliver) -> ChildProcess:
            self._metrics.note_start("front-end")
            arguments = FrontEndArguments(
                config=self._config,
                options=self._options,
                network=self._network,
                limits=self._limits,
                number=next(self._front_numbers),
                folder=folder,
                descriptor=descriptor,
                step_limit_s=self._step_limit_s + _REPLACING_S,
                silence_limit_s=self._silence_limit_s + _REPLACING_S,
            )
            return ChildProcess(
                serve_http,
                arguments,
                starter,
                deliver,
                role="front-end",
                send_timeout_s=_SEND_TIMEOUT_S,
                descriptors=[descriptor],
            )

        return self._supervise("A front end", start, heartbeat_timeout_s=self._silence_limit_s)

    def _supervise(self, name: str, start: _Start, *, heartbeat_timeout_s: float) -> SupervisedProcess:
        def on_message(message: CoreMessage) -> None:
            if isinstance(message, BrokerStatus):
                self._metrics.note_status(message)
                self._history.note(message)
            elif isinstance(message, FeaturesChanged):
                self._features = message.states
            elif isinstance(message, CoreStarted | FrontStarted):
                if isinstance(message, CoreStarted):
                    self._stages.end("processes", message.stage_s)
                self._events.put(name)
            elif isinstance(message, FrontEnded) and message.num_aborted:
                logger.warning("%s has aborted %d requests", name, message.num_aborted)

        return SupervisedProcess(
            name,
            start,
            on_message=on_message,
            on_failure=self._events.put,
            max_restarts=self._config.parallel.max_restarts,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )

    def _names(self) -> str:
        return ", ".join(self._options.served_model_name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._signal_time > _ONE_SIGNAL_S:
            self._events.put(number)
        self._signal_time = now


def _ending_signals() -> list[signal.Signals]:
    """Signals that end the server. SIGHUP is one, unless it is ignored (`nohup`)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]


def _raise_open_files_limit() -> None:
    """Let this process and its children open as many files as the system allows: every client takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
