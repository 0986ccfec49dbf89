"""Blocks of other engines: a server of a folder's files, and a client that copies them to another folder.

Both sides know one secret, from which the keys of their connection are derived (CurveZMQ): it is encrypted, and no
other client is answered. A file that comes is checked when it is loaded, as any file of the folder is.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from penstock.errors import ConfigError, PenstockError
from penstock.features.kv_files.files import LAYOUT, whole_file

logger = logging.getLogger(__name__)
_PATH = re.compile(rf"{LAYOUT}/[0-9a-f]{{32}}/[0-9a-f]{{2}}/[0-9a-f]{{64}}-[0-9]{{1,3}}")
# Files of one question, and files asked for at once.
_MOST_PATHS, _AT_ONCE = 1 << 16, 8
_MOST_BYTES = 1 << 30
# Seconds that a server waits for blocks which are about to be written, a client for an answer, and without asking a
# peer that has not answered.
_WAIT_S, _TIMEOUT_S, _PAUSE_S = 5.0, 10.0, 10.0
_POLL_MS, _IDLE_MS = 5, 200


class _Question(msgspec.Struct, frozen=True):
    """paths: of files, below the folder. wants_content: for one path, its content; otherwise whether each is there."""

    paths: list[str]
    wants_content: bool = False


@dataclass
class _Pending:
    """Question about files of which some are about to be written. until: seconds of `time.monotonic`."""

    client: bytes
    question: _Question
    until: float


def _keys(secret: bytes, side: str) -> tuple[bytes, bytes]:
    """Public and secret key of a side, as ZeroMQ takes them."""
    secret_key = z85.encode(hashlib.sha256(b"penstock kv blocks " + side.encode() + secret).digest())
    return zmq.curve_public(secret_key), secret_key


class PeerServer:
    """Answers other engines about the files of a folder, in a thread.

    names_to_come: names of files that are about to be written, for which an answer waits for a while.
    Raises ConfigError for an address at which it cannot listen.
    """

    def __init__(self, root: Path, address: str, secret: bytes, names_to_come: Callable[[], set[str]]) -> None:
        self._root, self._names_to_come = root, names_to_come
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_OneClient(_keys(secret, "client")[0]))
        self._socket = self._context.socket(zmq.ROUTER)
        _, self._socket.curve_secretkey = _keys(secret, "server")
        self._socket.curve_server = True
        self._socket.linger = 0
        self._socket.maxmsgsize = _MOST_PATHS * 128
        self._socket.sndhwm = 2 * _AT_ONCE
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._socket.close()
            self._authenticator.stop()
            self._context.term()
            raise ConfigError(f"kv_listen={address!r}: {error.strerror}. Give another address.") from error
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-tier-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def _run(self) -> None:
        pending: list[_Pending] = []
        while not self._is_closed:
            while self._socket.poll(_POLL_MS if pending else _IDLE_MS):
                client, *frames = self._socket.recv_multipart()
                try:
                    question = msgspec.msgpack.decode(frames[-1], type=_Question)
                except (msgspec.MsgspecError, IndexError):
                    continue
                pending.append(_Pending(client, question, time.monotonic() + _WAIT_S))
                if len(pending) >= _AT_ONCE:
                    break
            to_come = self._names_to_come() if pending else set()
            now = time.monotonic()
            waits = [one for one in pending if now < one.until and not to_come.isdisjoint(_names(one.question))]
            for one in pending:
                if one not in waits:
                    self._answer(one)
            pending = waits

    def _answer(self, one: _Pending) -> None:
        paths = [path if _PATH.fullmatch(path) else None for path in one.question.paths[:_MOST_PATHS]]
        if not one.question.wants_content:
            answer = bytes(path is not None and (self._root / path).exists() for path in paths)
        else:
            answer = b"" if not paths or paths[0] is None else _read(self._root / paths[0])
        try:
            self._socket.send_multipart([one.client, *map(str.encode, one.question.paths[:1]), answer], zmq.NOBLOCK)
        except zmq.ZMQError:
            logger.debug("A peer that asked for blocks is gone")


class _OneClient:
    """Allows one public key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class Peers:
    """Copies files of other engines' folders, in a thread. root: folder of this engine."""

    def __init__(self, root: Path, addresses: Sequence[str], secret: bytes) -> None:
        self._root, self._addresses, self._secret = root, addresses, secret
        self._context = zmq.Context()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Seconds of `time.monotonic` until which peers are not asked.
        self._paused: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="kv-tier-client", daemon=True)
        self._thread.start()

    @property
    def can_be_asked(self) -> bool:
        now = time.monotonic()
        return any(self._paused.get(address, 0.0) <= now for address in self._addresses)

    def find(self, paths: Sequence[str], then: Callable[[str, set[str]], None]) -> None:
        """Find a peer that has some of these files; call `then` with its address and those that it has.

        then: called in the thread, with "" and no files if there is none.
        """
        self._jobs.put(lambda: then(*self._find(paths)))

    def copy(self, address: str, paths: Sequence[str], then: Callable[[int], None]) -> None:
        """Copy files of a peer; call `then`, in the thread, with the bytes that have come."""
        self._jobs.put(lambda: then(self._copy(address, paths)))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(2 * _TIMEOUT_S)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _find(self, paths: Sequence[str]) -> tuple[str, set[str]]:
        now = time.monotonic()
        for address in self._addresses:
            if self._paused.get(address, 0.0) > now:
                continue
            try:
                with self._connected(address) as socket:
                    socket.send(msgspec.msgpack.encode(_Question(list(paths))))
                    answer = _received(socket)
            except Exception as error:  # whatever it is, the request that waits for the answer goes on
                self._pause(address, error)
                continue
            if any(answer):
                return address, {path for path, is_there in zip(paths, answer, strict=False) if is_there}
        return "", set()

    def _copy(self, address: str, paths: Sequence[str]) -> int:
        total, asked, left = 0, 0, len(paths)
        try:
            with self._connected(address) as socket:
                while left:
                    while asked < len(paths) and asked - (len(paths) - left) < _AT_ONCE:
                        socket.send(msgspec.msgpack.encode(_Question([paths[asked]], wants_content=True)))
                        asked += 1
                    path = paths[len(paths) - left]
                    content = _received(socket)
                    left -= 1
                    if content:
                        with whole_file(self._root / path) as file:
                            file.write(content)
                        total += len(content)
        except Exception as error:  # as in `_find`
            self._pause(address, error)
        return total

    def _connected(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = _keys(self._secret, "client")
        socket.curve_serverkey = _keys(self._secret, "server")[0]
        socket.linger, socket.maxmsgsize = 0, _MOST_BYTES
        socket.rcvtimeo = socket.sndtimeo = int(_TIMEOUT_S * 1000)
        socket.connect(f"tcp://{address}")
        return socket

    def _pause(self, address: str, error: Exception) -> None:
        logger.warning("The peer %s is not asked for blocks for %.0f s: %s", address, _PAUSE_S, error)
        self._paused[address] = time.monotonic() + _PAUSE_S


def _received(socket: zmq.Socket[bytes]) -> bytes:
    """The answer to the oldest question."""
    try:
        return socket.recv_multipart()[-1]
    except zmq.Again as error:
        raise PenstockError(f"it has not answered for {_TIMEOUT_S:.0f} s") from error


def _names(question: _Question) -> list[str]:
    return [path.rpartition("/")[2] for path in question.paths]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it was removed
