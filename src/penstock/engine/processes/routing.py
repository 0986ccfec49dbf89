"""Routing of requests to engines: prefix-aware load balancing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

# Prompt blocks remembered per engine: a million tokens in blocks of 16.
MAX_BLOCKS = 1 << 16
# Load limit of an engine that has a prompt's prefix: this multiple of the least loaded engine's requests, plus a few.
_MOST_TIMES, _MOST_MORE = 1.5, 4


class Router:
    """Routes a request to the engine with the longest prefix-cache hit, within a load limit; else to the least loaded.

    Hits are estimated from the prompts routed before; an engine may have evicted their blocks since.

    block_size: positions of a cached block; None without prefix caching.
    """

    def __init__(self, num_engines: int, block_size: int | None, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        # By engine: prefix hashes of prompts' blocks, least recently used first.
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]

    def choose(self, num_requests: Mapping[int, int], token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Choose the engine for a prompt, and remember the prompt's blocks for it.

        num_requests: unfinished requests, by candidate engine.
        """
        hashes = self._hashes(token_ids, cache_salt)
        most = _MOST_TIMES * min(num_requests.values()) + _MOST_MORE
        candidates = [engine for engine, number in num_requests.items() if number <= most]
        chosen = min(candidates, key=lambda engine: (-self._num_seen(engine, hashes), num_requests[engine]))
        seen = self._seen[chosen]
        # The first block is evicted last, since the others are not found without it.
        for block in reversed(hashes):
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._max_blocks:
            seen.popitem(last=False)
        return chosen

    def forget(self, engine: int) -> None:
        """Forget an engine's blocks, after its prefix cache was cleared."""
        self._seen[engine].clear()

    def _num_seen(self, engine: int, hashes: Sequence[int]) -> int:
        seen = self._seen[engine]
        return next((index for index, block in enumerate(hashes) if block not in seen), len(hashes))

    def _hashes(self, token_ids: Sequence[int], cache_salt: str | None) -> list[int]:
        """Prefix hashes of the prompt's full blocks. A collision costs time only."""
        if self._block_size is None:
            return []
        size = self._block_size
        hashes, last = [], hash(cache_salt)
        for start in range(0, len(token_ids) - size + 1, size):
            last = hash((last, *token_ids[start : start + size]))
            hashes.append(last)
        return hashes
