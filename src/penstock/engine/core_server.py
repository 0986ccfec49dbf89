"""A core behind a connection: it makes its steps by itself, and does in between what its client asks for."""

from __future__ import annotations

import contextlib
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from penstock.config import EngineConfig
from penstock.contract import decode, encode
from penstock.engine.core_client import CoreClient
from penstock.engine.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    CloseCore,
    CoreEnded,
    CoreStarted,
    FromCore,
    StepOutputs,
    ToCore,
    UtilityCall,
)
from penstock.errors import ConfigError, error_as_data
from penstock.observability.logging import configure_logging

_NOTHING = b""
_UTILITIES = frozenset({"reset_prefix_cache", "collective_rpc", "check_health"})


def run_core(connection: Connection, load_core: Callable[[EngineConfig], CoreClient], config: EngineConfig) -> None:
    """The life of a process that serves one core. It ends when its client lets go of the connection, however."""
    # Ctrl-C goes to the client too, which says what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging()
    try:
        core = load_core(config)
        try:
            _send(connection, CoreStarted(max_model_len=core.max_model_len, vocab_size=core.vocab_size))
            _serve(core, connection)
        finally:
            core.close()
    except (EOFError, ConnectionError):
        return
    except BaseException as error:
        _send(connection, CoreEnded(error=error_as_data(error)))
        raise SystemExit(1) from error


def read_all(
    connection: Connection,
    arrived: queue.SimpleQueue[bytes | None] | queue.Queue[bytes | None],
    wake: Callable[[], None] = lambda: None,
) -> None:
    """Take in what comes, for as long as there is room for it; None at the end. wake: called each time."""
    try:
        while True:
            arrived.put(connection.recv_bytes())
            wake()
    except (EOFError, OSError):
        arrived.put(None)
        wake()


def _serve(core: CoreClient, connection: Connection) -> None:
    # A client that goes on sending to a core that hangs is to notice.
    arrived: queue.Queue[bytes | None] = queue.Queue(maxsize=1)
    core.on_loss(lambda: _nudge(arrived))
    threading.Thread(target=read_all, args=(connection, arrived, core.wake), daemon=True).start()
    while True:
        # A core without requests has nothing to wait for but its client.
        while not (arrived.empty() and core.has_unfinished_requests()):
            data = arrived.get()
            if data == _NOTHING:
                continue
            message = CloseCore() if data is None else decode(data, ToCore).message
            if isinstance(message, CloseCore):
                return
            _send(connection, _answer(core, message))
        _send(connection, StepOutputs(outputs=core.step()))
        core.wait_for_work()


def _nudge(arrived: queue.Queue[bytes | None]) -> None:
    """Let whoever waits for a message look whether there is a step to make."""
    with contextlib.suppress(queue.Full):
        arrived.put_nowait(_NOTHING)


def _answer(core: CoreClient, message: AddRequest | AbortRequests | UtilityCall) -> Answer:
    try:
        if isinstance(message, AddRequest):
            core.add_request(message.request)
            return Answer(call_id=message.call_id)
        if isinstance(message, AbortRequests):
            return Answer(call_id=message.call_id, outputs=core.abort_requests(message.req_ids))
        return Answer(call_id=message.call_id, result=_call(core, message))
    except BaseException as error:
        return Answer(call_id=message.call_id, error=error_as_data(error))


def _call(core: CoreClient, message: UtilityCall) -> bytes:
    if message.method not in _UTILITIES:
        raise ConfigError(f"A core has no method {message.method!r} to be called. Allowed: {sorted(_UTILITIES)}.")
    return pickle.dumps(getattr(core, message.method)(*pickle.loads(message.arguments)))


def _send(connection: Connection, message: CoreStarted | StepOutputs | Answer | CoreEnded) -> None:
    connection.send_bytes(encode(FromCore(message)))
