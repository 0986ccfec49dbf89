"""Message of structured output: the bitmask of a step."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.contract.param_checks import shown
from penstock.contract.parts import Part
from penstock.errors import InvalidMessage

_BITS_PER_WORD = 32


class BitmaskPart(Part, frozen=True, kw_only=True):
    """Bitmask of the constrained requests that sample in a step.

    req_ids: in row order. bitmask: little-endian int32 words, row-major: per request one row, and one more per draft
    token; a set bit allows the token. num_rows: rows per request; empty if each has one.
    """

    feature = "bitmask"
    req_ids: list[str]
    bitmask: bytes
    num_rows: list[int] = msgspec.field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """Rows of each request."""
        return self.num_rows or [1] * len(self.req_ids)

    def anon_repr(self) -> str:
        return f"BitmaskPart(req_ids={self.req_ids}, rows={sum(self.rows)})"

    def check(self, vocab_size: int) -> None:
        num_requests, rows = len(self.req_ids), self.rows
        if not num_requests or len(rows) != num_requests or min(rows) < 1:
            raise _invalid("num_rows", rows, f"a number from 1 on for each of {num_requests} requests")
        num_bytes = num_words(vocab_size) * 4 * sum(rows)
        if len(self.bitmask) != num_bytes:
            allowed = f"{num_bytes} bytes, for {sum(rows)} rows of {vocab_size} tokens"
            raise _invalid("bitmask", f"{len(self.bitmask)} bytes", allowed)


def num_words(vocab_size: int) -> int:
    """Words of a row of the bitmask."""
    return -(-vocab_size // _BITS_PER_WORD)


def _invalid(name: str, value: Any, allowed: str) -> InvalidMessage:
    return InvalidMessage(f"{name}: {value if isinstance(value, str) else shown(value)}. Allowed: {allowed}.")
