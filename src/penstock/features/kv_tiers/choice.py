"""Choice of loading or computing what a prompt has in a tier, by the measured cost of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.contract import KVCacheConfig
from penstock.scheduler.block_pool import BlockKey
from penstock.scheduler.measured_costs import ComputeTimes, MeasuredCost

# Age of the last load from which on nothing is known of the next one: a busy disk must not be avoided for ever.
_FORGETS_AFTER_S = 60.0


class LoadBytes(NamedTuple):
    """Bytes to load, on one rank."""

    from_host: int
    from_folder: int

    def plus(self, other: LoadBytes) -> LoadBytes:
        return LoadBytes(self.from_host + other.from_host, self.from_folder + other.from_folder)

    @property
    def total(self) -> int:
        return self.from_host + self.from_folder


class LoadChoice:
    """Chooses to load the blocks of a hit if that is expected to end sooner than computing their tokens.

    Without a measurement of both they are loaded. compute_times: None to load always.
    """

    def __init__(self, config: KVCacheConfig, compute_times: ComputeTimes | None) -> None:
        self._compute_times = compute_times
        # Seconds of a load by a constant, and by its bytes of each source.
        self._load_cost = MeasuredCost(3, forgets_after_s=_FORGETS_AFTER_S)
        self._bytes_of_block = [config.block_bytes_of(group) for group in range(len(config.groups))]

    def num_bytes(self, blocks: Iterable[tuple[BlockKey, bool]]) -> LoadBytes:
        """Bytes of blocks by their keys, each with whether it is in host memory."""
        sizes = [0, 0]
        for (group, _), is_in_host in blocks:
            sizes[not is_in_host] += self._bytes_of_block[group]
        return LoadBytes(*sizes)

    def note_load(self, num_bytes: LoadBytes, seconds: float) -> None:
        """Note the time that blocks of so many bytes took to load."""
        self._load_cost.note((1.0, *num_bytes), max(seconds, 1e-6))

    def is_sooner_computed(self, first: int, num_tokens: int, num_bytes: LoadBytes) -> bool:
        """Whether tokens from a position on are computed before so many bytes are loaded, those of other loads too."""
        if self._compute_times is None:
            return False
        computed = self._compute_times.seconds(first, num_tokens)
        loaded = self._load_cost.seconds((1.0, *num_bytes))
        return computed is not None and loaded is not None and computed < loaded
