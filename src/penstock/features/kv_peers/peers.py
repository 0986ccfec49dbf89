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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from penstock.config.kv_tiers import is_ipv6
from penstock.errors import ConfigError, PenstockError
from penstock.features.kv_files.files import LAYOUT, whole_file
from penstock.features.kv_files.folder import about_in, folders_in
from penstock.features.kv_peers.shares import Shares, shares_of

logger = logging.getLogger(__name__)
_PATH = re.compile(rf"{LAYOUT}/[0-9a-f]{{32}}/[0-9a-f]{{2}}/[0-9a-f]{{64}}-[0-9]{{1,3}}")
# Files of one question, its size, and files asked for at once.
_MOST_PATHS, _MOST_QUESTION_BYTES, _AT_ONCE = 1 << 12, 1 << 20, 8
_MOST_BYTES = 1 << 30
# Clients of a server, and their questions that wait for blocks.
_MOST_CONNECTIONS, _MOST_PENDING = 256, 1024
# Seconds that a server waits for blocks which are about to be written, a client for an answer, and without asking a
# peer that has not answered.
_WAIT_S, _TIMEOUT_S, _PAUSE_S = 5.0, 10.0, 10.0
_HANDSHAKE_MS = 3000
# Seconds without connections after there were too many, and between two warnings.
_CLOSED_S, _WARN_S = 1.0, 60.0
_POLL_MS, _IDLE_MS = 5, 200
# Fields of the description of blocks that are compared for the log.
_COMPARED = ("model", "ranks", "block_size", "kv_cache_dtype", "max_model_len", "weight_version", "penstock")


class AddressTaken(ConfigError):
    """An address at which another process listens."""


class Source(NamedTuple):
    """Peer that has blocks. shares: how they are made of its ranks'; None where they are those of this engine's."""

    address: str
    shares: Shares | None = None


class _Question(msgspec.Struct, frozen=True):
    """paths: of files, below the folder. wants_content: for one path, its content; otherwise whether each is there.

    wants_about: descriptions of all blocks of the folder, by their digest, in place of both. wants_identity: of the
    folder on its machine, in place of all.
    """

    paths: list[str]
    wants_content: bool = False
    wants_about: bool = False
    wants_identity: bool = False


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
        self._socket.linger, self._socket.ipv6 = 0, is_ipv6(address)
        self._socket.maxmsgsize, self._socket.handshake_ivl = _MOST_QUESTION_BYTES, _HANDSHAKE_MS
        self._socket.sndhwm = self._socket.rcvhwm = 2 * _AT_ONCE
        self._connections = _Connections(self._socket, f"tcp://{address}")
        try:
            self._connections.listen()
        except zmq.ZMQError as error:
            self._close_sockets()
            kind = AddressTaken if error.errno == zmq.EADDRINUSE else ConfigError
            raise kind(f"kv_listen={address!r}: {error.strerror}. Give another address.") from error
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-tier-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._connections.close()
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def _run(self) -> None:
        pending: list[_Pending] = []
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._connections.monitor, zmq.POLLIN)
        while not self._is_closed:
            poller.poll(_POLL_MS if pending else _IDLE_MS)
            self._connections.update()
            pending += self._questions()
            pending = self._answer_all(pending)

    def _questions(self) -> Iterable[_Pending]:
        """Questions that have come; what is none gets no answer."""
        for _ in range(_AT_ONCE):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                question = msgspec.msgpack.decode(frames[-1], type=_Question)
            except (msgspec.MsgspecError, UnicodeError, IndexError):
                continue
            yield _Pending(client, question, time.monotonic() + _WAIT_S)

    def _answer_all(self, pending: list[_Pending]) -> list[_Pending]:
        """Answer the questions that wait for nothing; return the others."""
        to_come, now, waits = set[str](), time.monotonic(), []
        try:
            to_come = self._names_to_come() if pending else to_come
        except Exception as error:  # of the engine: what is there is answered
            logger.warning("The blocks in the making are not known: %s: %s", type(error).__name__, error)
        for number, one in enumerate(pending, start=1):
            may_wait = now < one.until and len(pending) - number < _MOST_PENDING
            try:
                if may_wait and self._awaits(one.question, to_come):
                    waits.append(one)
                else:
                    self._answer(one)
            except Exception as error:  # of one question: the others are answered
                logger.warning("A question of a peer is not answered: %s: %s", type(error).__name__, error)
        return waits

    def _awaits(self, question: _Question, to_come: Collection[str]) -> bool:
        """Whether a file is about to be written, and not there from before."""
        names = ((path, path.rpartition("/")[2]) for path in question.paths)
        return any(name in to_come and not self._has(path) for path, name in names)

    def _has(self, path: str) -> bool:
        return _PATH.fullmatch(path) is not None and (self._root / path).exists()

    def _answer(self, one: _Pending) -> None:
        question = one.question
        if question.wants_identity:
            answer = _identity(self._root)
        elif question.wants_about:
            answer = msgspec.msgpack.encode({folder.name: about_in(folder) for folder in folders_in(self._root)})
        elif question.wants_content:
            path = next(iter(question.paths), "")
            answer = _read(self._root / path) if _PATH.fullmatch(path) else b""
        else:
            answer = bytes(self._has(path) for path in question.paths[:_MOST_PATHS])
        frames = [one.client, *(path.encode() for path in question.paths[:1]), answer]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            logger.debug("A peer that asked for blocks is gone")


class _OneClient:
    """Allows one public key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class _Connections:
    """Limit of a listening socket's connections, most of which may be strangers': above it, all of them are closed.

    Peers connect again by themselves; what they have asked for meanwhile, they compute.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self._socket, self._endpoint = socket, endpoint
        self.monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._count = 0
        # Seconds of `time.monotonic` at which it listens again; None while it does.
        self._listen_at: float | None = 0.0
        self._warn_at = 0.0

    def listen(self) -> None:
        self._count, self._listen_at = 0, None
        self._socket.bind(self._endpoint)

    def update(self) -> None:
        """Count the connections, close too many, and listen again after a while."""
        while self.monitor.poll(0):
            self._count += 1 if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_ACCEPTED else -1
        now = time.monotonic()
        if self._listen_at is None and self._count > _MOST_CONNECTIONS:
            # Ends all connections of the address, too.
            self._socket.unbind(self._endpoint)
            self._listen_at = now + _CLOSED_S
            if now >= self._warn_at:
                self._warn_at = now + _WARN_S
                logger.warning("%s had %d connections, and has closed them all", self._endpoint, self._count)
        elif self._listen_at is not None and now >= self._listen_at:
            try:
                self.listen()
            except zmq.ZMQError as error:
                self._listen_at = now + _CLOSED_S
                logger.debug("%s is not free yet: %s", self._endpoint, error)

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(linger=0)


class Peers:
    """Copies files of other engines' folders, in a thread. root: folder of this engine.

    takes_other_ranks: make blocks of those of peers with another tensor parallel size, too.
    """

    def __init__(self, root: Path, addresses: Sequence[str], secret: bytes, *, takes_other_ranks: bool = False) -> None:
        self._takes_other_ranks = takes_other_ranks
        self._root, self._addresses, self._secret = root, addresses, secret
        self._context = zmq.Context()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Seconds of `time.monotonic` until which peers are not asked.
        self._paused: dict[str, float] = {}
        # Addresses that were compared with a kind of blocks of this engine, by its digest.
        self._compared: set[tuple[str, str]] = set()
        self._thread = threading.Thread(target=self._run, name="kv-tier-client", daemon=True)
        self._thread.start()

    @property
    def can_be_asked(self) -> bool:
        return not all(map(self._is_paused, self._addresses))

    def find(self, paths: Sequence[str], then: Callable[[Source, set[str]], None]) -> None:
        """Find a peer that has some of these files; call `then` with it and those that it has.

        then: called in the thread, without files if there is none.
        """
        self._jobs.put(lambda: then(*self._find(paths)))

    def copy(self, source: Source, paths: Sequence[str], then: Callable[[int], None]) -> None:
        """Copy files of a peer; call `then`, in the thread, with the bytes that have come."""
        self._jobs.put(lambda: then(self._copy(source, paths)))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(2 * _TIMEOUT_S)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _find(self, paths: Sequence[str]) -> tuple[Source, set[str]]:
        for address in self._addresses:
            if self._is_paused(address):
                continue
            shares = None
            try:
                with self._connected(address) as socket:
                    there = _those_there(socket, paths)
                    if not there and self._takes_other_ranks:
                        shares, there = self._find_shares(socket, paths)
                    if not there and shares is None:
                        self._compare(address, socket, paths[0].split("/")[1])
            except Exception as error:  # whatever it is, the request that waits for the answer goes on
                self._pause(address, error)
                continue
            if there:
                return Source(address, shares), there
        return Source(""), set()

    def _find_shares(self, socket: zmq.Socket[bytes], paths: Sequence[str]) -> tuple[Shares | None, set[str]]:
        """Files that can be made of those of a peer's ranks."""
        digests = dict.fromkeys(path.split("/")[1] for path in paths)
        shares = shares_of({digest: about_in(self._root / LAYOUT / digest) for digest in digests}, _abouts(socket))
        if shares is None:
            return None, set()
        sources = {path: shares.sources_of(path) for path in paths}
        there = _those_there(socket, list(dict.fromkeys(one for each in sources.values() for one in each)))
        return shares, {path for path, each in sources.items() if there.issuperset(each)}

    def _compare(self, address: str, socket: zmq.Socket[bytes], digest: str) -> None:
        """Say once how a peer's blocks differ from this engine's, where it has none that this engine can use."""
        if (address, digest) in self._compared:
            return
        theirs = _abouts(socket)
        if not theirs:
            return  # it has computed nothing yet
        self._compared.add((address, digest))
        if digest not in theirs:
            ours = about_in(self._root / LAYOUT / digest)
            logger.warning(
                "The peer %s has no blocks that this engine can use, and prompts are computed: it has %s",
                address,
                _difference(theirs.values(), ours),
            )

    def _copy(self, source: Source, paths: Sequence[str]) -> int:
        if source.shares is None:
            return self._fetch(source.address, paths)
        sources = dict.fromkeys(one for path in paths for one in source.shares.sources_of(path))
        wanted = [one for one in sources if not (self._root / one).exists()]
        self._fetch(source.address, wanted)
        total = 0
        for path in paths:
            try:
                total += source.shares.convert(self._root, path)
            except Exception as error:  # whatever it is, the block is computed
                logger.warning("A block of %s is not made of its shares: %s", source.address, error)
        for one in wanted:
            (self._root / one).unlink(missing_ok=True)
        return total

    def _fetch(self, address: str, paths: Sequence[str]) -> int:
        total, unasked, missing = 0, list(reversed(paths)), set(paths)
        if self._is_paused(address):
            return 0  # another one has waited for it already
        try:
            with self._connected(address) as socket:
                while missing:
                    while unasked and len(missing) - len(unasked) < _AT_ONCE:
                        socket.send(msgspec.msgpack.encode(_Question([unasked.pop()], wants_content=True)))
                    # Answers may come in another order: that for a block in the making waits.
                    path, content = _received(socket)
                    if path not in missing:
                        raise PenstockError(f"it has sent {path!r}, which was not asked for")
                    missing.remove(path)
                    if content:
                        with whole_file(self._root / path) as file:
                            file.write(content)
                        total += len(content)
        except Exception as error:  # as in `_find`
            self._pause(address, error)
        return total

    def _connected(self, address: str) -> zmq.Socket[bytes]:
        return _connected(self._context, address, self._secret)

    def _is_paused(self, address: str) -> bool:
        return time.monotonic() < self._paused.get(address, 0.0)

    def _pause(self, address: str, error: Exception) -> None:
        logger.warning("The peer %s is not asked for blocks for %.0f s: %s", address, _PAUSE_S, error)
        self._paused[address] = time.monotonic() + _PAUSE_S


def serves_folder(root: Path, address: str, secret: bytes) -> bool:
    """Whether an engine that listens at this address of this machine has this very folder, and the secret."""
    context = zmq.Context()
    try:
        with context.socket(zmq.PAIR) as probe:
            # Which address the name, or the "*", stands for.
            probe.ipv6 = is_ipv6(address)
            probe.bind(f"tcp://{address.rpartition(':')[0]}:*")
            host = probe.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")[0]
        with _connected(context, f"{host}:{address.rpartition(':')[2]}", secret) as socket:
            socket.send(msgspec.msgpack.encode(_Question([], wants_identity=True)))
            return _received(socket)[1] == _identity(root)
    except (zmq.ZMQError, PenstockError) as error:
        logger.info("%s is not known to be an engine of this folder: %s", address, error)
        return False
    finally:
        context.destroy(linger=0)


def _identity(root: Path) -> bytes:
    """Device and number of a folder, which no other one of its machine has."""
    status = root.stat()
    return b"%d-%d" % (status.st_dev, status.st_ino)


def _connected(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: bytes) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = _keys(secret, "client")
    socket.curve_serverkey = _keys(secret, "server")[0]
    socket.linger, socket.maxmsgsize, socket.ipv6 = 0, _MOST_BYTES, is_ipv6(address)
    socket.rcvtimeo = socket.sndtimeo = int(_TIMEOUT_S * 1000)
    socket.connect(f"tcp://{address}")
    return socket


def _received(socket: zmq.Socket[bytes]) -> tuple[str, bytes]:
    """The next answer, after the first path of its question. Raises PenstockError where none comes."""
    try:
        *path, answer = socket.recv_multipart()
    except zmq.Again as error:
        raise PenstockError(f"it has not answered for {_TIMEOUT_S:.0f} s") from error
    return path[0].decode() if path else "", answer


def _those_there(socket: zmq.Socket[bytes], paths: Sequence[str]) -> set[str]:
    """Files that a peer has."""
    there: set[str] = set()
    for first in range(0, len(paths), _MOST_PATHS):
        asked = list(paths[first : first + _MOST_PATHS])
        socket.send(msgspec.msgpack.encode(_Question(asked)))
        flags = _received(socket)[1]
        there.update(path for path, is_there in zip(asked, flags, strict=True) if is_there)
    return there


def _abouts(socket: zmq.Socket[bytes]) -> dict[str, dict[str, Any]]:
    """Descriptions of a peer's blocks by their digest."""
    socket.send(msgspec.msgpack.encode(_Question([], wants_about=True)))
    return msgspec.msgpack.decode(_received(socket)[1], type=dict[str, dict[str, Any]])


def _difference(theirs: Collection[Mapping[str, Any]], ours: Mapping[str, Any]) -> str:
    """How the blocks that are most like this engine's differ from these."""

    def differing(one: Mapping[str, Any]) -> list[str]:
        return [name for name in _COMPARED if one.get(name) != ours.get(name)]

    nearest = min(theirs, key=lambda one: len(differing(one)))
    shown = (f"{name} {nearest.get(name)!r} in place of {ours.get(name)!r}" for name in differing(nearest))
    return ", ".join(shown) or "other options, kernels or weights"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it was removed
