"""Blocks of engines with another tensor parallel size: their shares of heads are put together, and split anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.features.kv_files.files import LAYOUT, read_block, write_block


@dataclass(frozen=True)
class Shares:
    """How a rank's block is made of those of other ranks. All of them are paths below a folder.

    ranks: of this engine, by the digests of their folders. size: their number. theirs: digests of the other ranks'
    folders, in the order of their heads. page_bytes: of a block of one rank of this engine, by group and layer.
    """

    ranks: Mapping[str, int]
    size: int
    theirs: Sequence[str]
    page_bytes: Sequence[Sequence[int]]

    def sources_of(self, path: str) -> list[str]:
        """Paths of the blocks that a block is made of."""
        name = path.split("/", 2)[2]
        return [f"{LAYOUT}/{digest}/{name}" for digest in self.theirs]

    def convert(self, root: Path, path: str) -> int:
        """Make a block of its sources; return its bytes. Raises OSError, and DamagedBlock for a source."""
        rank, own_bytes = self.ranks[path.split("/")[1]], self.page_bytes[int(path.rpartition("-")[2])]
        shares = []
        for source in self.sources_of(path):
            pages = [np.empty(size * self.size // len(self.theirs), np.uint8) for size in own_bytes]
            read_block(str(root / source), pages)
            shares.append(pages)
        # A page is its heads, one after another.
        whole = [np.concatenate(pages) for pages in zip(*shares, strict=True)]
        own = [page[rank * size : (rank + 1) * size] for page, size in zip(whole, own_bytes, strict=True)]
        return write_block(str(root / path), own)


def shares_of(own: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]) -> Shares | None:
    """Shares of another engine that all of its ranks have; None without.

    own, theirs: descriptions of blocks by their digest; those of this engine are of some of its ranks.
    """
    of_one = next(iter(own.values()), {})
    kind, size = of_one.get("kind"), of_one.get("tensor_parallel_size")
    if kind is None or size is None:
        return None
    found: defaultdict[int, dict[int, str]] = defaultdict(dict)
    for digest, about in theirs.items():
        if about.get("kind") == kind and digest not in own:
            found[about["tensor_parallel_size"]][about["rank"]] = digest
    whole = [
        [of_ranks[rank] for rank in range(number)] for number, of_ranks in found.items() if len(of_ranks) == number
    ]
    if not whole:
        return None
    ranks = {digest: about["rank"] for digest, about in own.items()}
    # One engine's blocks of the same size have the same bits.
    return Shares(ranks, size, min(whole, key=lambda digests: abs(len(digests) - size)), of_one["page_bytes"])
