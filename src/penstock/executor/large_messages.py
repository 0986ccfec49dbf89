"""Messages between processes of one machine. Large ones lie in anonymous shared memory, which is written once for all
receivers and passed on as a descriptor.

The memory has no name: it is freed with the last descriptor and mapping of it, however processes end.
"""

from __future__ import annotations

import mmap
import os
import socket
from multiprocessing.connection import Connection
from types import TracebackType

from penstock.device.anonymous_memory import create_shared_memory
from penstock.errors import OutOfMemory

# A stream would copy them four times for each receiver.
_LARGE_BYTES = 1 << 20
# Message before the descriptor of a large one; no other is empty.
_DESCRIPTOR_FOLLOWS = b""
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Outgoing:
    """A message that is sent to one or several connections, which end in Unix sockets. A context manager."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data
        self._descriptor: int | None = None
        if len(data) >= _LARGE_BYTES:
            try:
                self._descriptor = create_shared_memory(len(data))
            except OutOfMemory:
                # Then it goes through the stream.
                return
            with mmap.mmap(self._descriptor, len(data)) as memory:
                memory[:] = data

    def __enter__(self) -> Outgoing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def send(self, connection: Connection) -> None:
        """Send the message. Raises what `Connection.send_bytes` raises."""
        if self._descriptor is None:
            connection.send_bytes(self._data)
            return
        connection.send_bytes(_DESCRIPTOR_FOLLOWS)
        with _socket_of(connection) as shared:
            socket.send_fds(shared, [b"."], [self._descriptor])


def send_message(connection: Connection, data: bytes | bytearray) -> None:
    """Send a message to one connection, as `Outgoing.send`."""
    with Outgoing(data) as message:
        message.send(connection)


def receive_message(connection: Connection) -> bytes | memoryview:
    """Receive a message of `Outgoing`. A large one is a view of its memory.

    Raises what `Connection.recv_bytes` raises.
    """
    data = connection.recv_bytes()
    if data != _DESCRIPTOR_FOLLOWS:
        return data
    with _socket_of(connection) as shared:
        _, descriptors, _, _ = socket.recv_fds(shared, 1, 1, _CLOSE_ON_EXEC)
    if not descriptors:
        raise EOFError
    (descriptor,) = descriptors
    try:
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))
