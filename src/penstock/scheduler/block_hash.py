"""Hashes of full blocks: equal hashes mean equal KV.

A block's KV depends on every token before it, so its hash covers its parent's hash. The hash is cryptographic, since a
collision would show one user's text to another, and equal in every process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from penstock.scheduler.request import Request

# The parent of a request's first block.
ROOT_HASH = bytes(32)

# Inputs of a block's content other than tokens, as (kind, value) pairs.
ExtraKeys = tuple[tuple[str, str], ...]


class BlockHasher:
    """Hashes full blocks of requests as their tokens become known."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._root = ROOT_HASH
        self._packing = struct.Struct(f"<{block_size}q")

    def begin_weights(self, weights: str) -> None:
        """Let no further hash equal one of other weights, whose KV differs. weights: their name."""
        self._root = hashlib.sha256(ROOT_HASH + weights.encode()).digest()

    def extend(self, request: Request) -> None:
        """Append the hashes of newly full blocks to `request.block_hashes`."""
        hashes, tokens, size = request.block_hashes, request.all_token_ids, self.block_size
        parent = hashes[-1] if hashes else self._root
        has_extra, hash_block = request.parts is not None or request.cache_salt is not None, self.hash_block
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            extra = extra_keys(request, start, start + size) if has_extra else ()
            parent = hash_block(parent, tokens[start : start + size], extra)
            hashes.append(parent)

    def hash_block(self, parent_hash: bytes, token_ids: Sequence[int], extra: ExtraKeys = ()) -> bytes:
        """Return the 32-byte hash of a block of exactly `block_size` tokens after the prefix of `parent_hash`."""
        content = parent_hash + self._packing.pack(*token_ids)
        # Parent and tokens have fixed lengths, so the extra keys cannot be mistaken for them.
        return hashlib.sha256(content + msgspec.msgpack.encode(extra) if extra else content).digest()


def extra_keys(request: Request, start: int, stop: int) -> ExtraKeys:
    """Return the extra keys of the block of the positions from start to stop.

    Keys of a whole request (its salt; an adapter's name) belong to the first block only, since the others inherit them
    through their parent.
    """
    salt = () if start or request.cache_salt is None else (("cache_salt", request.cache_salt),)
    if request.parts is None:
        return salt
    return salt + tuple(
        (f"part:{name}", key)
        for name, part in sorted(request.parts.items())
        for key in (*(() if start else part.block_keys()), *part.keys_of_block(start, stop))
    )
