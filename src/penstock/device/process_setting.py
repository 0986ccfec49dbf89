"""What an engine sets for its whole process, and leaves as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class ProcessSetting(Generic[_Value]):
    """One setting of the process, which several engines may want at the same time.

    The one that asked last has it its way. When it gives up, what the one before it asked for holds again; when the
    last one does, what was there before the first.

    read: what is set. write: sets it.
    """

    def __init__(self, read: Callable[[], _Value], write: Callable[[_Value], None]) -> None:
        self._read = read
        self._write = write
        self._lock = threading.Lock()
        # In the order in which they asked.
        self._wanted: dict[Hashable, _Value] = {}
        self._before: _Value

    def want(self, owner: Hashable, value: _Value) -> None:
        """Set it, until `give_up` of the same owner; asking again replaces what it asked for."""
        with self._lock:
            if not self._wanted:
                self._before = self._read()
            self._wanted.pop(owner, None)
            self._wanted[owner] = value
            self._write(value)

    def give_up(self, owner: Hashable) -> None:
        """The owner wants nothing any more; harmless when it never did."""
        with self._lock:
            if owner in self._wanted:
                del self._wanted[owner]
                self._write(next(reversed(self._wanted.values()), self._before))
