"""Blocks in host memory, as the scheduler keeps account of them: which pieces each has, and which one makes room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from penstock.features.kv_tiers.moves import HostLayout
from penstock.scheduler.block_pool import BlockKey


class HostBlock:
    """Block in host memory. pieces: of each rank. num_users: moves that read or write it. is_whole: can be read."""

    __slots__ = ("is_whole", "key", "num_users", "pieces")

    def __init__(self, key: BlockKey, pieces: tuple[int, ...]) -> None:
        self.key, self.pieces = key, pieces
        self.num_users = 0
        self.is_whole = False


class HostBlocks:
    """Blocks by their keys, least recently used first. A block without users makes room for others.

    layouts: of all ranks, which keep their shares of a block in pieces of the same numbers. note_lost: called with the
    key of a whole block that is forgotten.
    """

    def __init__(self, layouts: Sequence[HostLayout], note_lost: Callable[[BlockKey], None] = lambda _: None) -> None:
        self._note_lost = note_lost
        self._num_pieces = min(layout.num_pieces for layout in layouts)
        counts = zip(*(layout.pieces_of_block for layout in layouts), strict=True)
        self._pieces_of_block = [max(of_group) for of_group in counts]
        self._num_touched = 0
        # Pieces that had content once.
        self._free: list[int] = []
        self._blocks: OrderedDict[BlockKey, HostBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def lacks(self, key: BlockKey) -> bool:
        """Whether the block could be there, and is neither there nor being written."""
        return key not in self._blocks and self._pieces_of_block[key[0]] <= self._num_pieces

    def find(self, key: BlockKey) -> HostBlock | None:
        """A whole block; None if it is not there."""
        block = self._blocks.get(key)
        return block if block is not None and block.is_whole else None

    def add(self, key: BlockKey) -> HostBlock | None:
        """A block to write to, used until `release`; None if all others are used, and there is no room."""
        wanted = self._pieces_of_block[key[0]]
        while self._room < wanted:
            unused = next((block for block in self._blocks.values() if not block.num_users), None)
            if unused is None:
                return None
            self.forget(unused.key)
        block = self._blocks[key] = HostBlock(key, tuple(self._take() for _ in range(wanted)))
        block.num_users = 1
        return block

    def use(self, block: HostBlock) -> None:
        """Keep a whole block until `release`."""
        block.num_users += 1
        self.refresh((block.key,))

    def release(self, block: HostBlock) -> None:
        """End a use of a block, which may be forgotten already."""
        block.num_users -= 1
        if not block.num_users and self._blocks.get(block.key) is not block:
            self._free += block.pieces

    def refresh(self, keys: Iterable[BlockKey]) -> None:
        """Count blocks as used now, those that are there, the last one as the latest."""
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def forget(self, key: BlockKey) -> None:
        """Let a block not be found any more."""
        block = self._blocks.pop(key, None)
        if block is not None and not block.num_users:
            self._free += block.pieces
        if block is not None and block.is_whole:
            self._note_lost(key)

    def clear(self) -> None:
        """Forget all blocks."""
        for key in list(self._blocks):
            self.forget(key)

    @property
    def _room(self) -> int:
        return len(self._free) + self._num_pieces - self._num_touched

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return self._num_touched - 1
