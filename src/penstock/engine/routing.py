"""Which of several engines gets a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

# Blocks of prompts that are remembered of each engine: a million tokens in blocks of 16.
MAX_BLOCKS = 1 << 16
# How many requests an engine may have that has seen a prompt's beginning: so many times those of the least busy one,
# and these more.
_MOST_TIMES, _MOST_MORE = 1.5, 4


class Router:
    """Sends requests to the engine with the fewest, or to one that has seen the beginning of their prompt.

    That one has it in its prefix cache, unless it was pushed out since; so it may have more requests than others, but
    not many more.

    block_size: positions of a cached block; None where nothing is cached.
    """

    def __init__(self, num_engines: int, block_size: int | None, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        # By engine: hashes of prompts' blocks with all that is before them, the latest last.
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]

    def choose(self, num_requests: Mapping[int, int], token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """The engine for a prompt, which it then has seen.

        num_requests: unfinished ones, of each engine that may be chosen.
        """
        hashes = self._hashes(token_ids, cache_salt)
        most = _MOST_TIMES * min(num_requests.values()) + _MOST_MORE
        candidates = [engine for engine, number in num_requests.items() if number <= most]
        chosen = min(candidates, key=lambda engine: (-self._num_seen(engine, hashes), num_requests[engine]))
        seen = self._seen[chosen]
        # The first block is the last to be forgotten, since without it the others are not found.
        for block in reversed(hashes):
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._max_blocks:
            seen.popitem(last=False)
        return chosen

    def forget(self, engine: int) -> None:
        """Its cache is empty now."""
        self._seen[engine].clear()

    def _num_seen(self, engine: int, hashes: Sequence[int]) -> int:
        seen = self._seen[engine]
        return next((index for index, block in enumerate(hashes) if block not in seen), len(hashes))

    def _hashes(self, token_ids: Sequence[int], cache_salt: str | None) -> list[int]:
        """Of the prompt's full blocks. Two prompts that have one by accident cost time, and nothing else."""
        if self._block_size is None:
            return []
        size = self._block_size
        hashes, last = [], hash(cache_salt)
        for start in range(0, len(token_ids) - size + 1, size):
            last = hash((last, *token_ids[start : start + size]))
            hashes.append(last)
        return hashes
