"""Process-wide settings of engines, restored afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class ProcessSetting(Generic[_Value]):
    """Process-wide setting that several engines may request at the same time.

    The latest request applies. When its owner gives up, the one before it applies again; after the last one, the
    original value.

    read: returns the present value. write: sets it.
    """

    def __init__(self, read: Callable[[], _Value], write: Callable[[_Value], None]) -> None:
        self._read = read
        self._write = write
        self._lock = threading.Lock()
        # In the order of the requests.
        self._wanted: dict[Hashable, _Value] = {}
        self._before: _Value

    def want(self, owner: Hashable, value: _Value) -> None:
        """Set the value, until `give_up` of the same owner; a repeated call replaces the owner's request."""
        with self._lock:
            if not self._wanted:
                self._before = self._read()
            self._wanted.pop(owner, None)
            self._wanted[owner] = value
            self._write(value)

    def give_up(self, owner: Hashable) -> None:
        """Withdraw the owner's request, if any."""
        with self._lock:
            if owner in self._wanted:
                del self._wanted[owner]
                self._write(next(reversed(self._wanted.values()), self._before))
