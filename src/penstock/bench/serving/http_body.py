"""Decoders of HTTP/1.1 response bodies, by framing."""

from __future__ import annotations

from typing import Protocol


class MalformedResponse(Exception):
    """Bytes that are not an HTTP/1.1 response, or a body that is not what its headers say."""


class BodyDecoder(Protocol):
    """Decoder of one body. is_complete: whether the body has ended."""

    is_complete: bool

    def feed(self, data: bytes) -> bytes:
        """Return the body's bytes in the next bytes of the connection. Raises MalformedResponse."""

    def end_of_connection(self) -> bool:
        """Whether a connection that closes now ends the body properly."""


class SizedBody:
    """Body of a known length in bytes."""

    def __init__(self, size: int) -> None:
        self._left = size
        self.is_complete = size == 0

    def feed(self, data: bytes) -> bytes:
        if len(data) > self._left:
            raise MalformedResponse(f"{len(data) - self._left:,} bytes follow the body of a response")
        self._left -= len(data)
        self.is_complete = self._left == 0
        return data

    def end_of_connection(self) -> bool:
        return self.is_complete


class BodyUntilClose:
    """Body that ends with its connection."""

    is_complete = False

    def feed(self, data: bytes) -> bytes:
        return data

    def end_of_connection(self) -> bool:
        return True


class ChunkedBody:
    """Body in chunked transfer coding (RFC 9112, section 7.1)."""

    def __init__(self) -> None:
        self.is_complete = False
        self._rest = b""
        # Bytes of the present chunk that are still to come, with the line end behind it.
        self._left = 0
        self._in_trailers = False

    def feed(self, data: bytes) -> bytes:
        if self._rest:
            data, self._rest = self._rest + data, b""
        pieces = []
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                # The last two bytes of a chunk are its line end.
                is_end = self._left - len(piece)
                pieces.append(piece[: max(len(piece) - max(2 - is_end, 0), 0)])
                self._left -= len(piece)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._rest = data[at:]
                break
            self._take_line(data[at:end])
            at = end + 2
            if self.is_complete and at < len(data):
                raise MalformedResponse(f"{len(data) - at:,} bytes follow the body of a response")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end_of_connection(self) -> bool:
        return self.is_complete

    def _take_line(self, line: bytes) -> None:
        """Take the line with a chunk's size, or a trailer."""
        if self._in_trailers:
            self.is_complete = not line
            return
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError as error:
            raise MalformedResponse(f"{line[:40]!r} is not the size of a chunk") from error
        if size:
            self._left = size + 2
        else:
            self._in_trailers = True
