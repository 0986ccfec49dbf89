"""C++ attention over latents: the definition, and the same bits for any chunking of a request and any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.native import NativeKernels, load_native_kernels
from penstock.kernels.native.attention import HeadShape, StepRequests
from support.instruction_sets import AVAILABLE, needs_native_kernels

pytestmark = needs_native_kernels
SCALE = 0.3


class Latents:
    """Requests of random tokens over a paged cache of latents, whose steps may be cut anywhere."""

    def __init__(
        self, kernels: NativeKernels, lengths: tuple[int, ...], dtype: torch.dtype, *, sizes: tuple[int, int, int, int]
    ) -> None:
        """sizes: query heads, elements of a key, elements of its value, positions of a block."""
        generator = torch.Generator().manual_seed(3)
        self.kernels = kernels
        self.num_heads, self.key_size, self.latent_size, self.block_size = sizes
        heads = torch.randn(sum(lengths), self.num_heads + 1, self.key_size, generator=generator)
        self.heads = heads.split(lengths)
        num_blocks = [-(-length // self.block_size) for length in lengths]
        self.table = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
        ids = np.random.default_rng(0).permutation(sum(num_blocks)) + 1
        for row, count in enumerate(num_blocks):
            first = sum(num_blocks[:row])
            self.table[row, :count] = torch.from_numpy(ids[first : first + count])
        # What was in memory before is not a number.
        shape = 1, sum(num_blocks) + 1, 1, self.block_size, self.key_size
        self.kv_cache = torch.full(shape, float("nan"), dtype=dtype)

    def step(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Attention of positions start..stop of each (request, start, stop)."""
        heads_THD = torch.cat([self.heads[index][start:stop] for index, start, stop in parts])
        counts = [stop - start for _, start, stop in parts]
        key_TKD = heads_THD[:, self.num_heads :]
        output = self.kernels.attention(
            heads_THD[:, : self.num_heads],
            key_TKD,
            key_TKD[..., self.key_size - self.latent_size :],
            self.kv_cache,
            StepRequests.of(
                torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
                torch.tensor([stop for _, _, stop in parts], dtype=torch.int32),
                self.table[[index for index, _, _ in parts]],
                len(parts),
            ),
            HeadShape(
                self.num_heads, 1, self.key_size, self.block_size, SCALE, None, None, latent_size=self.latent_size
            ),
        )
        return list(output.split(counts))

    def expected(self, index: int) -> Tensor:
        """Attention of a whole request by definition, of keys as the cache keeps them."""
        query = self.heads[index][:, : self.num_heads].double()
        key = self.heads[index][:, self.num_heads].to(self.kv_cache.dtype).double()
        scores = torch.einsum("qhd,kd->hqk", query, key) * SCALE
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,kd->qhd", weights, key[:, -self.latent_size :]).float()


@pytest.mark.parametrize("instruction_set", AVAILABLE)
@pytest.mark.parametrize("sizes", [(3, 20, 12, 4), (16, 72, 64, 16), (7, 50, 33, 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.one_case_quick
def test_a_request_has_the_same_bits_alone_in_a_batch_and_in_chunks(
    instruction_set: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    kernels = load_native_kernels(instruction_set)
    assert kernels is not None
    lengths = (1, 5, 64, 65, 130, 17)
    cache = Latents(kernels, lengths, dtype, sizes=sizes)
    together = cache.step([(index, 0, length) for index, length in enumerate(lengths)])
    for index, found in enumerate(together):
        torch.testing.assert_close(found, cache.expected(index), rtol=0, atol=2e-5)
    alone, chunked = (Latents(kernels, lengths, dtype, sizes=sizes) for _ in range(2))
    for index, length in enumerate(lengths):
        assert torch.equal(alone.step([(index, 0, length)])[0], together[index])
        # The last position once more, as a decode over what the cache holds.
        assert torch.equal(alone.step([(index, length - 1, length)])[0], together[index][-1:])
        for start in range(0, length, 23):
            stop = min(start + 23, length)
            assert torch.equal(chunked.step([(index, start, stop)])[0], together[index][start:stop])


@pytest.mark.slow
def test_long_contexts_have_the_same_bits_however_they_are_shared_among_threads() -> None:
    kernels = load_native_kernels(AVAILABLE[0])
    assert kernels is not None
    cache = Latents(kernels, (3000,), torch.float32, sizes=(16, 72, 64, 16))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (whole,) = cache.step([(0, 0, 3000)])
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            for stop in (3000, 2049, 1025, 1024, 70):
                assert torch.equal(cache.step([(0, stop - 1, stop)])[0], whole[stop - 1 : stop])
                assert torch.equal(cache.step([(0, stop - 5, stop)])[0], whole[stop - 5 : stop])
    finally:
        torch.set_num_threads(before)
