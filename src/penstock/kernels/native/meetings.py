"""What processes of one machine do together, in memory that all of them have: `csrc/meeting.h`."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Together(IntEnum):
    """What a meeting is for, in the library's numbers. That of the rank whose bytes all get is added to BROADCAST."""

    GATHER = 0
    SUM = 1
    BROADCAST = 2


class Meetings:
    """The library's functions for one rank of a group.

    address: of the shared memory, which begins with zeros. slot_bytes: what a rank gives at a time; a multiple of 8.
    spin_us: how long a rank that waits keeps its processor before it sleeps.
    """

    def __init__(self, module: Any, address: int, rank: int, size: int, slot_bytes: int, spin_us: int) -> None:
        self._meet = module.meet
        self._who = (address, rank, size, slot_bytes)
        self._spin_us = spin_us

    def meet(self, together: int, given: int, num_bytes: int, rows: int, result: int, timeout_s: float) -> int:
        """Exchange bytes with all other ranks, which make the same call. given, result: addresses.

        Returns 0; 1 + the rank that did not come in time; or -1 - the rank that makes another call. After either of
        the two, nothing more can be done in this memory.
        """
        status: int = self._meet(
            *self._who, together, given, num_bytes, rows, result, int(timeout_s * 1e6), self._spin_us
        )
        return status
