"""In which process an engine can be used."""

from __future__ import annotations

import os

from penstock.errors import LifecycleError


class OwningProcess:
    """The process that this object is made in. Whatever is forked from it has a copy, but none of its threads."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise LifecycleError in any other process."""
        if not self.is_here():
            raise LifecycleError(
                f"This engine was started in process {self._pid} and cannot be used in its forked child "
                f"{os.getpid()}. Start the child with the 'spawn' method (multiprocessing.get_context('spawn')), or "
                "create an engine in it."
            )
