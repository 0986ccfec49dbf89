"""Brokers in processes of their own, and front ends that connect to them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.config import EngineConfig
from penstock.config.queue import QueueLimits
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.messages import BrokerStatus, CoreMessage, FeaturesChanged
from penstock.engine.processes.broker import BrokerArguments, serve_fronts
from penstock.engine.processes.broker_connection import BrokerConnection, BrokerState
from penstock.engine.processes.child_process import ChildProcess
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.processes.core_group import Deliver as GroupDeliver
from penstock.engine.processes.supervised_process import Deliver, SupervisedProcess
from penstock.errors import PenstockError
from penstock.executor.processes import ProcessStarter
from support.fake_engine import FakeCore, load_fake_core
from support.waiting import PATIENCE_S


class BrokerUnderTest:
    """A broker of fake cores, started again after its loss. failures: why it ended for good. statuses: heartbeats."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        limits: QueueLimits | None = None,
        load_core: Callable[[EngineConfig], FakeCore] = load_fake_core,
        heartbeat_timeout_s: float = 60.0,
    ) -> None:
        self.config = config
        self.path = str(folder / "broker")
        self.failures: list[PenstockError] = []
        self.statuses: list[BrokerStatus] = []
        self.has_failed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._starter = ProcessStarter()
        self._arguments = BrokerArguments(config, limits or QueueLimits(), self._listener.fileno(), load_core)
        self._features: bytes | None = None
        self.process = SupervisedProcess(
            "the broker",
            self._start,
            on_message=self._note,
            on_failure=self._fail,
            max_restarts=3,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )

    def connect(self, may_connect: threading.Event | None = None) -> AsyncEngine:
        """Start a front end. may_connect: it waits for this event before each connection."""

        def connect(deliver: GroupDeliver) -> BrokerConnection:
            if may_connect is not None:
                assert may_connect.wait(PATIENCE_S)
            return BrokerConnection(self.path, BrokerState(), deliver)

        return AsyncEngine.from_config(self.config, lambda config: CoreGroup(config, connect=connect))

    def close(self) -> None:
        self.process.close()
        self._listener.close()
        self._starter.close()

    def _start(self, deliver: Deliver) -> ChildProcess:
        return ChildProcess(
            serve_fronts,
            replace(self._arguments, features=self._features),
            self._starter,
            deliver,
            role="broker",
            send_timeout_s=10.0,
            descriptors=[self._listener.fileno()],
        )

    def _note(self, message: CoreMessage) -> None:
        if isinstance(message, BrokerStatus):
            self.statuses.append(message)
        elif isinstance(message, FeaturesChanged):
            self._features = message.states

    def _fail(self, error: PenstockError) -> None:
        self.failures.append(error)
        self.has_failed.set()
