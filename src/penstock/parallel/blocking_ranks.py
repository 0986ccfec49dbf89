"""Which rank it is that the others wait for, once they wait in vain: one who waits itself is not the one."""

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
class VainWait:
    """What a rank has found out. for_ranks: whom it waited for. has_lost: their connections have ended, not its time.

    call: in which; without the step, so that it can be compared.
    """

    rank: int
    call: str
    for_ranks: list[int]
    has_lost: bool


def find_missing(store: Store, own: VainWait, grace_s: float) -> tuple[list[int], list[VainWait]]:
    """The ranks that no rank on the way to them has excused, and what the others on that way have found out.

    Ranks tell each other through the store, within `grace_s`. Where it does not answer either, since whoever keeps it
    is the one, those are missing that this rank has waited for.
    """
    found: dict[int, VainWait] = {}

    def ask() -> None:
        try:
            store.set(_key(own.rank), json.dumps(asdict(own)))
            deadline = time.monotonic() + grace_s
            while _missing(own, found) and time.monotonic() < deadline:
                for rank in _missing(own, found):
                    if store.check([_key(rank)]):
                        found[rank] = VainWait(**json.loads(store.get(_key(rank))))
                time.sleep(_POLL_S)
        except RuntimeError:
            return

    store.set_timeout(timedelta(seconds=grace_s))
    # The store has no limit for every wait, and a thread need not be waited for.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * grace_s)
    return _missing(own, found), list(found.values())


def _missing(own: VainWait, found: dict[int, VainWait]) -> list[int]:
    on_the_way = _reached(own.for_ranks, found)
    return sorted(rank for rank in on_the_way if rank not in found and rank != own.rank)


def _reached(ranks: Iterable[int], found: dict[int, VainWait]) -> set[int]:
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
