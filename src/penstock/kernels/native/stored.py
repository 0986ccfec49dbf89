"""Argument memory of repeated library calls."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class StoredArguments:
    """An int64 array in memory, for a call that takes its address."""

    __slots__ = ("_values", "address")

    def __init__(self, values: Iterable[int]) -> None:
        self._values = array("q", values)
        self.address: int = self._values.buffer_info()[0]
