"""Memory of partial results in the C++ split-KV attention, which no tensor holds. Needs no torch.

One thread computes a KV head, or a few, of a request with few tokens, unless its context is more than a quarter of a
thread's share of the step: then threads compute chunks of the context (split-KV).
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.contract import AttentionSpec, KVCacheSpec, LocalAttentionSpec
from penstock.device.dtypes import has_native_kernels

# Constants of csrc/attention_plan.inl: query rows per work item, positions per tile and per chunk, and the share of a
# thread's chunks from which on a request is split.
QUERY_ROWS = 24
TILE_POSITIONS = 64
CHUNK_POSITIONS = 1024
SHARES_OF_A_THREAD = 4
# Floats per row besides its values: a vector of the widest instruction set, and the row's maximum score.
SUMS_BESIDE_VALUES = 16 + 1
_FLOAT_BYTES = 4


def split_context_bytes(
    specs: Iterable[KVCacheSpec],
    num_heads: int,
    *,
    max_model_len: int,
    num_threads: int,
    device: str,
) -> int:
    """Return the maximum over layers, in bytes. num_heads: query heads.

    A split unit has more chunks than all KV heads of all requests together, divided by four times the number of
    threads. So fewer units than that are split, each into as many chunks as the longest context has; and several heads
    form one unit only if they have no more rows together than one head may have.
    """
    if device != "cpu" or num_threads == 1 or not has_native_kernels():
        return 0
    num_split = SHARES_OF_A_THREAD * num_threads
    attention = {spec for spec in specs if isinstance(spec, AttentionSpec)}
    parts = (num_split * _most_chunks(spec, max_model_len) * _partial_bytes(spec, num_heads) for spec in attention)
    return max(parts, default=0)


def chunk_positions(block_size: int) -> int:
    """Return the positions of a chunk: whole tiles of whole blocks."""
    tile = max(block_size, TILE_POSITIONS // block_size * block_size)
    return max(tile, CHUNK_POSITIONS // tile * tile)


def _most_chunks(spec: AttentionSpec, max_model_len: int) -> int:
    chunk = chunk_positions(spec.block_size)
    most = -(-max_model_len // chunk)
    if isinstance(spec, LocalAttentionSpec):
        # What several queries read together may begin and end within a chunk.
        most = min(most, -(-(spec.num_read + QUERY_ROWS) // chunk) + 1)
    return most


def _partial_bytes(spec: AttentionSpec, num_heads: int) -> int:
    num_rows = max(QUERY_ROWS, num_heads // spec.num_kv_heads)
    return num_rows * (spec.head_size + SUMS_BESIDE_VALUES) * _FLOAT_BYTES
