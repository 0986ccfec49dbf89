"""Servers and clients of blocks that get anything but what they expect: they go on, and nothing wrong is loaded."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.features.kv_files.files import LAYOUT
from penstock.features.kv_peers import peers
from penstock.features.kv_peers.peers import AddressTaken, Peers, PeerServer, Source, serves_folder
from support.waiting import wait_until

SECRET = b"a secret of some length"
DIGEST = "0" * 32


def free_address(host: str = "127.0.0.1") -> str:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.bind((host, 0))
        return f"{f'[{host}]' if ':' in host else host}:{one.getsockname()[1]}"


def path_of(number: int) -> str:
    name = f"{number:064x}"
    return f"{LAYOUT}/{DIGEST}/{name[:2]}/{name}-0"


def write(root: Path, number: int) -> str:
    path = root / path_of(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"block %d" % number)
    return path_of(number)


@contextmanager
def serving(root: Path, names_to_come: Callable[[], set[str]] = set, host: str = "127.0.0.1") -> Iterator[str]:
    address = free_address(host)
    server = PeerServer(root, address, SECRET, names_to_come)
    try:
        yield address
    finally:
        server.close()


@contextmanager
def client_of(address: str, root: Path) -> Iterator[Peers]:
    client = Peers(root, [address], SECRET)
    try:
        yield client
    finally:
        client.close()


def found(client: Peers, paths: list[str]) -> set[str]:
    answers: list[set[str]] = []
    client.find(paths, lambda source, there: answers.append(there))
    wait_until(lambda: answers, "an answer")
    return answers[0]


def copied(client: Peers, address: str, paths: list[str]) -> int:
    answers: list[int] = []
    client.copy(Source(address), paths, answers.append)
    wait_until(lambda: answers, "copies")
    return answers[0]


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    return tmp_path / "theirs", tmp_path / "ours"


def test_a_file_gets_its_own_content_where_another_one_is_awaited(roots: tuple[Path, Path]) -> None:
    """A block that has vanished is computed anew, so its name is to come; answers for others overtake its answer."""
    theirs, ours = roots
    paths = [write(theirs, number) for number in range(6)]
    (theirs / paths[0]).unlink()
    to_come = {os.path.basename(paths[0])}
    with serving(theirs, lambda: to_come) as address, client_of(address, ours) as client:
        timer = threading.Timer(0.3, lambda: (write(theirs, 0), to_come.clear()))
        timer.start()
        assert copied(client, address, paths) == 6 * len(b"block 0")
        timer.join()
    assert [(ours / path).read_bytes() for path in paths] == [b"block %d" % number for number in range(6)]


def test_addresses_of_ipv6(roots: tuple[Path, Path]) -> None:
    theirs, ours = roots
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with serving(theirs, host="::1") as address, client_of(address, ours) as client:
        assert copied(client, address, [write(theirs, 0)]) == len(b"block 0")


def test_a_file_that_is_there_is_not_awaited(roots: tuple[Path, Path]) -> None:
    theirs, ours = roots
    paths = [write(theirs, number) for number in range(3)]
    names = {os.path.basename(path) for path in paths}
    with serving(theirs, lambda: names) as address, client_of(address, ours) as client:
        begin = time.monotonic()
        assert found(client, paths) == set(paths)
        assert copied(client, address, paths) > 0
        assert time.monotonic() - begin < peers._WAIT_S


@pytest.mark.parametrize("host", ["127.0.0.1", "*"])
def test_an_address_of_an_engine_with_the_same_folder_is_no_strangers(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.5)
    theirs, ours = roots
    address = f"{host}:{free_address().rpartition(':')[2]}"
    server = PeerServer(theirs, address, SECRET, set)
    try:
        with pytest.raises(AddressTaken, match=f"kv_listen='{re.escape(address)}': Address already in use"):
            PeerServer(theirs, address, SECRET, set)
        assert serves_folder(theirs, address, SECRET)
        assert not serves_folder(ours, address, SECRET)
        assert not serves_folder(theirs, address, b"another secret of some length")
    finally:
        server.close()


def test_files_that_are_there_are_answered_where_those_to_come_are_not_known(roots: tuple[Path, Path]) -> None:
    theirs, ours = roots

    def fail() -> set[str]:
        raise RuntimeError("dictionary changed size during iteration")

    with serving(theirs, fail) as address, client_of(address, ours) as client:
        assert copied(client, address, [write(theirs, 0)]) == len(b"block 0")


def test_more_files_than_one_question_has(roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_MOST_PATHS", 4)
    theirs, ours = roots
    paths = [write(theirs, number) for number in range(11)]
    (theirs / paths[7]).unlink()
    with serving(theirs) as address, client_of(address, ours) as client:
        assert found(client, paths) == {*paths} - {paths[7]}


def test_a_server_goes_on_after_random_bytes(roots: tuple[Path, Path]) -> None:
    theirs, ours = roots
    paths = [write(theirs, number) for number in range(3)]
    choose = random.Random(5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    with serving(theirs) as address, client_of(address, ours) as client:
        host, _, port = address.partition(":")
        for number in range(60):
            with socket.create_connection((host, int(port))) as raw:
                sent = choose.randbytes(choose.choice([1, 63, 64, 200, 5000]))
                mechanism = choose.choice([b"NULL", b"PLAIN", b"CURVE", sent[:20]])
                begins = greeting + mechanism.ljust(20, b"\0") + bytes(32) if number % 2 else b""
                with contextlib.suppress(OSError):  # it has closed the connection
                    raw.sendall(begins + sent)
        # With the secret, too.
        with client._connected(address) as asked:
            for _ in range(200):
                frames = [choose.randbytes(choose.choice([0, 1, 5, 100])) for _ in range(choose.randint(1, 3))]
                asked.send_multipart(frames)
            for odd in ({}, [], None, {"paths": 1}, {"paths": ["\0", "a/../b"]}, {"paths": [path_of(0) + "\0"]}):
                asked.send(msgspec.msgpack.encode(odd))
            for wants in ({"wants_content": True}, {"wants_about": True}, {}):
                asked.send(msgspec.msgpack.encode({"paths": ["\udcff".encode("utf-8", "replace").decode()], **wants}))
        assert found(client, paths) == set(paths)
        assert copied(client, address, paths) > 0


def test_a_question_that_fails_is_not_the_end_of_the_others(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = roots
    paths = [write(theirs, number) for number in range(3)]
    reads = iter([MemoryError("too large")])

    def read(path: Path) -> bytes:
        for error in reads:
            raise error
        return path.read_bytes()

    monkeypatch.setattr(peers, "_read", read)
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.5)
    with serving(theirs) as address, client_of(address, ours) as client:
        copied(client, address, paths)
        client._paused.clear()
        assert copied(client, address, paths) > 0
    assert "A question of a peer is not answered: MemoryError" in caplog.text


def test_connections_are_limited_and_a_peer_is_answered_again_once_strangers_are_gone(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "_MOST_CONNECTIONS", 8)
    monkeypatch.setattr(peers, "_CLOSED_S", 0.2)
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.5)
    theirs, ours = roots
    path = write(theirs, 1)
    before = len(os.listdir("/proc/self/fd"))
    with serving(theirs) as address, client_of(address, ours) as client:
        host, _, port = address.partition(":")
        strangers: list[socket.socket] = []
        for _ in range(200):
            try:
                strangers.append(socket.create_connection((host, int(port)), timeout=5))
            except OSError:
                time.sleep(0.01)
        assert "and has closed them all" in caplog.text
        # Descriptors of the strangers alone: the server has closed its own.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) < before + len(strangers) + 40, "connections are closed")
        for stranger in strangers:
            stranger.close()

        def is_answered() -> bool:
            client._paused.clear()
            return found(client, [path]) == {path}

        wait_until(is_answered, "the server answers")


@contextmanager
def odd_server(answers: Callable[[list[bytes]], list[bytes]]) -> Iterator[str]:
    """A peer with the secret whose answers are anything."""
    address = free_address()
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    _, server.curve_secretkey = peers._keys(SECRET, "server")
    server.curve_server = True
    server.linger = 0
    server.bind(f"tcp://{address}")
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            if server.poll(20):
                client, *frames = server.recv_multipart()
                server.send_multipart([client, *answers(frames)])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield address
    finally:
        is_over.set()
        thread.join()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "answer",
    [[b""], [b"\x01"], [b"kv-1/x", b"\x01" * 9], [b"\xff", b"\x01" * 3], [b"a", b"b", b"c"]],
    ids=["empty", "short", "long", "no-text", "three"],
)
def test_an_odd_answer_leaves_no_file_and_pauses_the_peer(roots: tuple[Path, Path], answer: list[bytes]) -> None:
    _, ours = roots
    paths = [path_of(number) for number in range(3)]
    with odd_server(lambda frames: answer) as address, client_of(address, ours) as client:
        assert found(client, paths) <= set(paths)
        client._paused.clear()
        assert copied(client, address, paths) == 0
        assert not client.can_be_asked
    assert [path for path in ours.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"model": "b", "ranks": 1}, "it has model 'b' in place of 'a'"),
        ({"model": "a", "ranks": 2}, "it has ranks 2 in place of 1"),
        ({"model": "a", "ranks": 1}, "it has other options, kernels or weights"),
        (None, None),
    ],
)
def test_the_log_says_once_why_a_peer_has_nothing_to_copy(
    roots: tuple[Path, Path], caplog: pytest.LogCaptureFixture, theirs: dict[str, Any] | None, expected: str | None
) -> None:
    root, ours = roots
    for folder, about in ((root / LAYOUT / ("1" * 32), theirs), (ours / LAYOUT / DIGEST, {"model": "a", "ranks": 1})):
        if about is not None:
            folder.mkdir(parents=True)
            (folder / "about.json").write_bytes(msgspec.json.encode(about))
    with serving(root) as address, client_of(address, ours) as client:
        for _ in range(3):
            assert found(client, [path_of(1)]) == set()
    assert caplog.text.count("has no blocks that this engine can use") == (0 if expected is None else 1)
    assert expected is None or expected in caplog.text


def test_a_peer_that_hangs_is_waited_for_once(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that have found blocks there do not wait for their copies one after another."""
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.3)
    _, ours = roots
    answers: list[int] = []
    with client_of(free_address(), ours) as client:
        (address,) = client._addresses
        for number in range(5):
            client.copy(Source(address), [path_of(number)], answers.append)
        wait_until(lambda: len(answers) == 5, "the copies end")
    assert answers == [0] * 5
    assert caplog.text.count("it has not answered") == 1
