"""Steps of paged attention with random queries and caches, and their results by the specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.paged_attention import paged_attention_reference
from support.triton_device import DEVICE

NAN = float("nan")


@dataclass
class Step:
    """Queries and a cache with a shuffled block table; positions that no query may read are NaN."""

    query_THD: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int

    def expected(
        self, window: int | None = None, soft_cap: float | None = None, sinks_H: Tensor | None = None
    ) -> Tensor:
        """The specification in float32, over finite memory."""
        caches = (self.key_cache.float().nan_to_num(7.0), self.value_cache.float().nan_to_num(7.0))
        layout = self.block_table, self.query_start_loc, self.seq_lens, self.max_query_len
        query_THD = self.query_THD.float()
        return paged_attention_reference(query_THD, *caches, *layout, self.scale, window, soft_cap, sinks_H)

    @property
    def scale(self) -> float:
        return self.query_THD.shape[-1] ** -0.5

    def part_of_last(self, first: int, last: int) -> Step:
        """The last request alone, with these of its tokens in the step, whose keys and values are in the cache."""
        start = int(self.query_start_loc[-2])
        count = len(self.query_THD) - start
        return replace(
            self,
            query_THD=self.query_THD[start + first : start + last],
            block_table=self.block_table[-1:],
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
            seq_lens=self.seq_lens[-1:] - count + last,
            max_query_len=last - first,
        )

    @property
    def cache(self) -> tuple[Tensor, Tensor]:
        return self.key_cache, self.value_cache


def make_step(
    parts: Sequence[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """parts: positions before the step and in the step, by request."""
    generator = torch.Generator().manual_seed(3)
    lengths = [before + count for before, count in parts]
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = 1 + sum(needed) + 2
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).int()
    # Entries beyond a request's blocks are stale: blocks that the request may not read.
    table = order[-1].repeat(len(parts), max(needed) + 1)
    cache = torch.full((num_blocks, 2, block_size, num_kv_heads, head_size), NAN)
    taken = 0
    for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        blocks = table[row, :count] = order[taken : taken + count]
        taken += count
        positions = torch.arange(length)
        data = torch.randn(length, 2, num_kv_heads, head_size, generator=generator)
        cache[blocks[positions // block_size].long(), :, positions % block_size] = data
    starts = torch.tensor([0] + [count for _, count in parts]).cumsum(0)
    query = torch.randn(int(starts[-1]), num_heads, head_size, generator=generator)
    cache = cache.to(dtype).to(DEVICE).transpose(0, 1)
    return Step(
        query.to(dtype).to(DEVICE),
        cache[0],
        cache[1],
        table.to(DEVICE),
        starts.int().to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32).to(DEVICE),
        max(count for _, count in parts),
    )


def assert_equal(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
