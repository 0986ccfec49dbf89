"""Arguments of calls that are made again and again with the same ones."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class StoredArguments:
    """Integers of 64 bits side by side in memory, for a call that takes their address."""

    __slots__ = ("_values", "address")

    def __init__(self, values: Iterable[int]) -> None:
        self._values = array("q", values)
        self.address: int = self._values.buffer_info()[0]
