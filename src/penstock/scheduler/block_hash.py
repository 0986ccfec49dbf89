"""Names for the content of full blocks: equal names mean equal keys and values in the cache.

A block's keys and values depend on every token before it, so its hash covers its parent's hash. The hash is
cryptographic, since a collision would show one user's text to another, and the same in every process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from penstock.scheduler.request import Request

# The parent of a request's first block.
ROOT_HASH = bytes(32)

# What besides the tokens decides a block's content, as (kind, value) pairs.
ExtraKeys = tuple[tuple[str, str], ...]


class BlockHasher:
    """Hashes requests block by block, as their tokens become known."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._packing = struct.Struct(f"<{block_size}q")

    def extend(self, request: Request) -> None:
        """Append to `request.block_hashes` what its known tokens fill; earlier hashes are not computed again."""
        hashes, tokens, size = request.block_hashes, request.all_token_ids, self.block_size
        parent = hashes[-1] if hashes else ROOT_HASH
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            parent = self.hash_block(parent, tokens[start : start + size], extra_keys(request, start))
            hashes.append(parent)

    def hash_block(self, parent_hash: bytes, token_ids: Sequence[int], extra: ExtraKeys = ()) -> bytes:
        """32 bytes that name a block of exactly `block_size` tokens after the prefix that `parent_hash` names."""
        content = parent_hash + self._packing.pack(*token_ids)
        # Parent and tokens have fixed lengths, so that what follows them can only be the extra keys.
        return hashlib.sha256(content + msgspec.msgpack.encode(extra) if extra else content).digest()


def extra_keys(request: Request, start: int) -> ExtraKeys:
    """What besides tokens decides the content of the block that begins at position `start`.

    What holds for a whole request (its salt; an adapter's name) belongs to the first block only, since the others
    inherit it through their parent. What enters at a position (an image's hash) belongs to each block it covers.
    """
    if start > 0:
        return ()
    salt = () if request.cache_salt is None else (("cache_salt", request.cache_salt),)
    if request.parts is None:
        return salt
    return salt + tuple(
        (f"part:{name}", key) for name, part in sorted(request.parts.items()) for key in part.block_keys()
    )
