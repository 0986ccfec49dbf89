"""C++ attention: the same bits for any chunking of a request and any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.native import NativeKernels, load_native_kernels
from penstock.kernels.native.attention import HeadShape, StepRequests
from support.instruction_sets import AVAILABLE, needs_native_kernels
from support.kv_caches import KV_CACHES

pytestmark = needs_native_kernels
LENGTHS = (1, 5, 64, 65, 130, 17, 200)


class Cache:
    """Requests of random tokens over a paged cache, whose steps may be cut anywhere."""

    def __init__(
        self,
        kernels: NativeKernels,
        *,
        group_size: int,
        head_size: int,
        block_size: int,
        window: int | None,
        cache: str,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        dtype, layout = KV_CACHES[cache]
        self.kernels = kernels
        shape = (sum(LENGTHS), 2 * group_size + 4, head_size)
        self.heads = torch.randn(shape, generator=generator).split(LENGTHS)
        self.num_heads = 2 * group_size
        sizes = self.num_heads, 2, head_size, block_size
        self.shape = HeadShape(*sizes, 0.3, window, None, bfloat16_layout=layout)
        num_blocks = [-(-length // block_size) for length in LENGTHS]
        self.table = torch.zeros(len(LENGTHS), max(num_blocks), dtype=torch.int32)
        ids = np.random.default_rng(0).permutation(sum(num_blocks)) + 1
        for row, count in enumerate(num_blocks):
            first = sum(num_blocks[:row])
            self.table[row, :count] = torch.from_numpy(ids[first : first + count])
        # What was in memory before is not a number; neither is an int8 block's scale of four bytes of -1.
        width, stale = (head_size + 4, -1) if dtype is torch.int8 else (head_size, float("nan"))
        self.kv_cache = torch.full((2, sum(num_blocks) + 1, 2, block_size, width), stale, dtype=dtype)

    def step(self, parts: list[tuple[int, int, int]], ends: list[list[int]] | None = None) -> list[Tensor]:
        """Attention of positions start..stop of each (request, start, stop). ends: of what each token sees."""
        heads_THD = torch.cat([self.heads[index][start:stop] for index, start, stop in parts])
        counts = [stop - start for _, start, stop in parts]
        requests = StepRequests.of(
            torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            torch.tensor([stop for _, _, stop in parts], dtype=torch.int32),
            self.table[[index for index, _, _ in parts]],
            len(parts),
        )
        if ends is not None:
            requests = requests.seeing(torch.tensor([end for some in ends for end in some], dtype=torch.int32))
        output = self.kernels.attention(
            heads_THD[:, : self.num_heads],
            heads_THD[:, self.num_heads : self.num_heads + 2],
            heads_THD[:, self.num_heads + 2 :],
            self.kv_cache,
            requests,
            self.shape,
        )
        return list(output.split(counts))


@pytest.mark.parametrize("instruction_set", AVAILABLE)
@pytest.mark.parametrize(("group_size", "head_size"), [(1, 64), (3, 20), (8, 16)])
@pytest.mark.parametrize("block_size", [4, 16, 80])
@pytest.mark.parametrize("window", [None, 40, -40])
@pytest.mark.parametrize("cache", KV_CACHES)
@pytest.mark.one_case_quick
def test_a_request_has_the_same_bits_alone_in_a_batch_and_in_chunks(
    instruction_set: str, group_size: int, head_size: int, block_size: int, window: int | None, cache: str
) -> None:
    kernels = load_native_kernels(instruction_set)
    assert kernels is not None
    sizes = {"group_size": group_size, "head_size": head_size, "block_size": block_size}
    shape: dict[str, Any] = {**sizes, "window": window, "cache": cache}
    together = Cache(kernels, **shape).step([(index, 0, length) for index, length in enumerate(LENGTHS)])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            alone = Cache(kernels, **shape)
            for index, length in enumerate(LENGTHS):
                assert torch.equal(alone.step([(index, 0, length)])[0], together[index])
                # The last position once more, as a decode over what the cache holds.
                assert torch.equal(alone.step([(index, length - 1, length)])[0], together[index][-1:])
            chunked = Cache(kernels, **shape)
            for index, length in enumerate(LENGTHS):
                for start in range(0, length, 23):
                    stop = min(start + 23, length)
                    assert torch.equal(chunked.step([(index, start, stop)])[0], together[index][start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("instruction_set", AVAILABLE)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("cache", KV_CACHES)
@pytest.mark.one_case_quick
def test_tokens_that_see_one_another_have_the_same_bits_alone_in_a_batch_and_in_chunks(
    instruction_set: str, window: int | None, cache: str
) -> None:
    kernels = load_native_kernels(instruction_set)
    assert kernels is not None
    shape: dict[str, Any] = {"group_size": 3, "head_size": 20, "block_size": 16, "window": window, "cache": cache}
    # Runs of 30 tokens after 2 of text; of the last run, as many as there are.
    ends = [[max(p + 1, min(p // 32 * 32 + 32, n)) if p % 32 > 1 else p + 1 for p in range(n)] for n in LENGTHS]
    whole = [(index, 0, length) for index, length in enumerate(LENGTHS)]
    causal = Cache(kernels, **shape)
    own = [list(range(1, length + 1)) for length in LENGTHS]
    assert all(map(torch.equal, causal.step(whole, own), causal.step(whole)))
    together = Cache(kernels, **shape).step(whole, ends)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            alone, chunked = Cache(kernels, **shape), Cache(kernels, **shape)
            for index, length in enumerate(LENGTHS):
                assert torch.equal(alone.step([(index, 0, length)], [ends[index]])[0], together[index])
                for start in range(0, length, 32):
                    part = slice(start, min(start + 32, length))
                    output = chunked.step([(index, part.start, part.stop)], [ends[index][part]])[0]
                    assert torch.equal(output, together[index][part])
    finally:
        torch.set_num_threads(before)


_IN_BFLOAT16 = [pytest.param(f"bfloat16-by-{order}", marks=pytest.mark.slow) for order in ("pairs", "tiles")]


@pytest.mark.parametrize("window", [None, 1500, -1500])
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("cache", ["float32", *_IN_BFLOAT16])
def test_long_contexts_have_the_same_bits_however_they_are_shared_among_threads(
    window: int | None, num_kv_heads: int, group_size: int, cache: str
) -> None:
    """One thread never splits a context; many threads split one that is long, and less where there is other work. Where
    there is much of it, a thread goes through all KV heads of a request at once."""
    kernels = load_native_kernels(AVAILABLE[0])
    assert kernels is not None
    length, head_size, block_size = 5000, 16, 16
    generator = torch.Generator().manual_seed(4)
    num_query_heads = num_kv_heads * group_size
    heads = torch.randn(length, num_query_heads + 2 * num_kv_heads, head_size, generator=generator)
    num_blocks = -(-length // block_size)
    table = torch.randperm(num_blocks, generator=generator).to(torch.int32)[None] + 1
    dtype, layout = KV_CACHES[cache]
    sizes = num_query_heads, num_kv_heads, head_size, block_size
    shape = HeadShape(*sizes, 0.3, window, None, bfloat16_layout=layout)

    def step(kv_cache: Tensor, parts: list[tuple[int, int]]) -> Tensor:
        starts = torch.tensor([0, *np.cumsum([stop - start for start, stop in parts])], dtype=torch.int32)
        rows = torch.cat([heads[start:stop] for start, stop in parts])
        seq_lens = torch.tensor([stop for _, stop in parts], dtype=torch.int32)
        requests = StepRequests.of(starts, seq_lens, table.expand(len(parts), -1), len(parts))
        parts_of_heads = rows.split([num_query_heads, num_kv_heads, num_kv_heads], 1)
        return kernels.attention(*parts_of_heads, kv_cache, requests, shape)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        kv_cache = torch.full((2, num_blocks + 1, num_kv_heads, block_size, head_size), float("nan"), dtype=dtype)
        whole = step(kv_cache, [(0, length)])
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            for stop in (length, 4097, 2049, 1025, 1024, 1000):
                # A decode, a few tokens that lie on both sides of a chunk's border, and both beside a long one.
                assert torch.equal(step(kv_cache, [(stop - 1, stop)])[0], whole[stop - 1])
                assert torch.equal(step(kv_cache, [(stop - 3, stop)]), whole[stop - 3 : stop])
                together = step(kv_cache, [(stop - 1, stop), (stop - 6, stop)])
                assert torch.equal(together, torch.cat([whole[stop - 1 : stop], whole[stop - 6 : stop]]))
            ends = (length, 4097, 3500, 2049, 5, length - 1, 1025, 4000)
            assert torch.equal(step(kv_cache, [(stop - 1, stop) for stop in ends]), whole[[stop - 1 for stop in ends]])
    finally:
        torch.set_num_threads(before)
    positions = torch.arange(length)
    keys, values = heads[:, num_query_heads:].double().split(num_kv_heads, 1)
    for position in (1023, 1024, 3000, length - 1):
        is_seen = positions <= position
        if window is not None:
            is_seen &= positions > position - window if window > 0 else positions // -window == position // -window
        query = heads[position, :num_query_heads].double().view(num_kv_heads, group_size, head_size)
        weights = (query @ keys[is_seen].permute(1, 2, 0) * 0.3).softmax(-1)
        expected = (weights @ values[is_seen].transpose(0, 1)).flatten(0, 1)
        tolerance = 1e-5 if layout is None else 0.02
        torch.testing.assert_close(whole[position].double(), expected, rtol=tolerance, atol=tolerance)
