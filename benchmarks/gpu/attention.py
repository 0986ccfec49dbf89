"""Decode attention of one layer on a GPU: microseconds and share of the copy bandwidth, by tiling and splits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from penstock.attention import LayerAttention
from penstock.attention.triton_paged import TritonPagedBackend
from penstock.contract import FullAttentionSpec
from penstock.kernels.triton.paged_attention import Tiling, choose_num_splits, decode_attention

_BLOCK_SIZE = 16
# Requests, positions, query heads, KV heads.
_SHAPES = (
    (1, 128, 32, 8),
    (1, 1024, 32, 8),
    (64, 1024, 32, 8),
    (256, 1024, 32, 8),
    (256, 1024, 16, 8),
    (8, 8192, 32, 8),
)
# Positions of a tile, warps, stages.
_TILINGS = tuple(
    Tiling(16, *sizes)
    for sizes in (
        (64, 4, 3),
        (64, 4, 2),
        (64, 4, 4),
        (64, 8, 3),
        (64, 2, 3),
        (128, 4, 2),
        (128, 8, 2),
        (32, 4, 4),
        (32, 2, 4),
    )
)


def time_in_a_graph(work: Callable[[], Any], num_calls: int = 20) -> float:
    """Microseconds of a call, of `num_calls` in a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_calls)
    return float(sorted(times)[2])


def measure(add: Callable[..., None], bandwidth: float) -> None:
    """Add a row per shape: the present choice and the five best of others."""
    for num_reqs, length, num_heads, num_kv_heads in _SHAPES:
        head_size = 128
        spec = FullAttentionSpec(
            block_size=_BLOCK_SIZE, num_kv_heads=num_kv_heads, head_size=head_size, dtype="bfloat16"
        )
        blocks_of_each = length // _BLOCK_SIZE
        num_blocks = 1 + num_reqs * blocks_of_each
        layer = LayerAttention("layer", num_heads, num_kv_heads, head_size, head_size**-0.5)
        pages = torch.zeros(num_blocks, spec.page_size_bytes, dtype=torch.uint8, device="cuda")
        cache = TritonPagedBackend(layer).view_pages(pages, spec)
        blocks = 1 + torch.randperm(num_blocks - 1, device="cuda").to(torch.int32).view(num_reqs, -1)
        table = torch.zeros(num_reqs, max(128, blocks_of_each), dtype=torch.int32, device="cuda")
        table[:, :blocks_of_each] = blocks
        lengths = torch.full((num_reqs,), length, dtype=torch.int32, device="cuda")
        query = torch.randn(num_reqs, num_heads, head_size, dtype=torch.bfloat16, device="cuda")
        num_bytes = 4 * num_reqs * length * num_kv_heads * head_size

        def attend(splits: int | None, tiling: Tiling | None, args: Any = (query, cache, table, lengths)) -> None:
            query, cache, table, lengths = args
            decode_attention(query, cache[0], cache[1], table, lengths, 0.088, num_splits=splits, tiling=tiling)

        found = {"present": time_in_a_graph(partial(attend, None, None))}
        chosen = choose_num_splits(num_reqs, num_kv_heads, table.shape[1] * _BLOCK_SIZE, query.device)
        others = sorted({chosen, max(1, chosen // 2), max(1, chosen // 4), min(32, chosen * 2), min(32, chosen * 4)})
        for tiling in _TILINGS:
            found[str(tiling)] = time_in_a_graph(partial(attend, chosen, tiling))
        best = min(_TILINGS, key=lambda tiling: found[str(tiling)])
        for splits in others:
            found[f"splits {splits}, {best}"] = time_in_a_graph(partial(attend, splits, best))
        add(
            measured="decode attention",
            num_reqs=num_reqs,
            length=length,
            num_heads=num_heads,
            num_splits=chosen,
            of_bandwidth=num_bytes / bandwidth / (min(found.values()) * 1e-6),
            us={name: round(us, 2) for name, us in sorted(found.items(), key=lambda item: item[1])[:6]},
            present_us=found["present"],
        )
