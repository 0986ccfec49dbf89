"""The memory in which the C++ attention keeps what threads find in their parts of a context, before it is joined.

A KV head of a request of few tokens, or a few of its heads, is computed by one thread, unless its context is more than
a quarter of a thread's share of the step: then its chunks are (split-KV). No tensor holds this. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.contract import AttentionSpec, KVCacheSpec, SlidingWindowSpec
from penstock.device.dtypes import has_native_kernels

# Of csrc/attention_plan.inl: query rows of an item, positions of a tile and of a chunk. Requests that are split have
# more chunks than this share of a thread's.
QUERY_ROWS = 24
TILE_POSITIONS = 64
CHUNK_POSITIONS = 1024
SHARES_OF_A_THREAD = 4
# Floats beside a row's values: a vector of the widest instruction set, and the row's largest score.
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
    """At most, in the layer that takes the most; all layers take turns. num_heads: of the queries.

    What is split has more chunks than are in all KV heads of all requests together, divided by four times the threads.
    So fewer than four times the threads' number of units are split, each in as many chunks as the longest context has;
    and several heads are one unit only if they have no more rows together than one head may have.
    """
    if device != "cpu" or num_threads == 1 or not has_native_kernels():
        return 0
    num_split = SHARES_OF_A_THREAD * num_threads
    attention = {spec for spec in specs if isinstance(spec, AttentionSpec)}
    parts = (num_split * _most_chunks(spec, max_model_len) * _partial_bytes(spec, num_heads) for spec in attention)
    return max(parts, default=0)


def chunk_positions(block_size: int) -> int:
    """A chunk is a number of whole tiles, a tile one of whole blocks."""
    tile = max(block_size, TILE_POSITIONS // block_size * block_size)
    return max(tile, CHUNK_POSITIONS // tile * tile)


def _most_chunks(spec: AttentionSpec, max_model_len: int) -> int:
    chunk = chunk_positions(spec.block_size)
    most = -(-max_model_len // chunk)
    if isinstance(spec, SlidingWindowSpec):
        # What several queries see together may begin and end within a chunk.
        most = min(most, -(-(spec.sliding_window + QUERY_ROWS) // chunk) + 1)
    return most


def _partial_bytes(spec: AttentionSpec, num_heads: int) -> int:
    num_rows = max(QUERY_ROWS, num_heads // spec.num_kv_heads)
    return num_rows * (spec.head_size + SUMS_BESIDE_VALUES) * _FLOAT_BYTES
