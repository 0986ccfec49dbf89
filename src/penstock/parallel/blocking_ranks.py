"""Find the rank that blocks the others after a timeout: one that does not wait itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import Store

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class FailedWait:
    """Failed wait of a rank for others.

    call: the call, without the step, so that it can be compared. for_ranks: ranks that it waited for. has_lost: whether
    their connection ended; else the wait timed out.
    """

    rank: int
    call: str
    for_ranks: list[int]
    has_lost: bool


def find_missing(store: Store, own: FailedWait, grace_s: float) -> tuple[list[int], list[FailedWait]]:
    """Follow the failed waits from this rank on; return the ranks at their ends and the failed waits of the others.

    Ranks publish their failed waits in the store, within `grace_s`. If the store does not answer either, since its host
    is the missing rank, the ranks that this rank waited for are missing.
    """
    found: dict[int, FailedWait] = {}

    def ask() -> None:
        try:
            store.set(_key(own.rank), json.dumps(asdict(own)))
            deadline = time.monotonic() + grace_s
            while _missing(own, found) and time.monotonic() < deadline:
                for rank in _missing(own, found):
                    if store.check([_key(rank)]):
                        found[rank] = FailedWait(**json.loads(store.get(_key(rank))))
                time.sleep(_POLL_S)
        except RuntimeError:
            return

    store.set_timeout(timedelta(seconds=grace_s))
    # Not every call of the store has a timeout, and a daemon thread need not be joined.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * grace_s)
    return _missing(own, found), list(found.values())


def _missing(own: FailedWait, found: dict[int, FailedWait]) -> list[int]:
    on_the_way = _reached(own.for_ranks, found)
    return sorted(rank for rank in on_the_way if rank not in found and rank != own.rank)


def _reached(ranks: Iterable[int], found: dict[int, FailedWait]) -> set[int]:
    reached: set[int] = set()
    waiting = list(ranks)
    while waiting:
        rank = waiting.pop()
        if rank not in reached:
            reached.add(rank)
            waiting += found[rank].for_ranks if rank in found else ()
    return reached


def _key(rank: int) -> str:
    return f"waited/{rank}"
