"""Large messages between processes: written once, equal at every receiver, and nothing of them is left."""

from __future__ import annotations

import os
from multiprocessing import Pipe

import psutil
import pytest

from penstock.errors import OutOfMemory
from penstock.executor import large_messages
from penstock.executor.large_messages import Outgoing, receive_message, send_message

MESSAGES = [b"small", bytes(range(256)) * 5000, b"x", os.urandom(1 << 20), b"last"]


def num_descriptors() -> int:
    return psutil.Process().num_fds()


def test_messages_arrive_in_order_at_all_receivers() -> None:
    before = num_descriptors()
    pipes = [Pipe() for _ in range(3)]
    for data in MESSAGES:
        with Outgoing(data) as message:
            for ours, _ in pipes:
                message.send(ours)
    for _, theirs in pipes:
        received = [receive_message(theirs) for _ in MESSAGES]
        assert [bytes(one) for one in received] == MESSAGES
        assert [isinstance(one, memoryview) for one in received] == [False, True, False, True, False]
    del received
    for pipe in pipes:
        for end in pipe:
            end.close()
    assert num_descriptors() == before


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_nothing_is_left_of_a_message_that_is_not_taken(who: str) -> None:
    before = num_descriptors()
    ours, theirs = Pipe()
    send_message(ours, MESSAGES[1])
    if who == "sender":
        # It has ended, and its message is still read.
        ours.close()
        assert receive_message(theirs) == MESSAGES[1]
        with pytest.raises(EOFError):
            receive_message(theirs)
    ours.close()
    theirs.close()
    assert num_descriptors() == before
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(OSError, match=r"."):
        send_message(ours, MESSAGES[1])
    ours.close()
    assert num_descriptors() == before


def test_a_sender_that_ends_within_a_message_ends_it() -> None:
    ours, theirs = Pipe()
    ours.send_bytes(b"")
    ours.close()
    with pytest.raises(EOFError):
        receive_message(theirs)
    theirs.close()


def test_without_memory_for_it_a_message_goes_through_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OutOfMemory("none")

    monkeypatch.setattr(large_messages, "create_shared_memory", refuse)
    monkeypatch.setattr(large_messages, "_LARGE_BYTES", 1000)
    ours, theirs = Pipe()
    send_message(ours, b"y" * 2000)
    assert receive_message(theirs) == b"y" * 2000
    ours.close()
    theirs.close()
