"""What only our own CPU attention promises: the same bits however a request is cut and whatever else runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.native import NativeKernels, available_instruction_sets, load_native_kernels

AVAILABLE = [found.name for found in available_instruction_sets()]
pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the C++ kernels were not built")
LENGTHS = (1, 5, 64, 65, 130, 17, 200)


class Cache:
    """Requests of random tokens over a paged cache, whose steps may be cut anywhere."""

    def __init__(
        self, kernels: NativeKernels, *, group_size: int, head_size: int, block_size: int, window: int | None
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.kernels, self.block_size, self.window = kernels, block_size, window
        self.num_kv_heads, self.head_size = 2, head_size
        shape = (sum(LENGTHS), 2 * group_size + 4, head_size)
        self.heads = torch.randn(shape, generator=generator).split(LENGTHS)
        self.num_heads = 2 * group_size
        num_blocks = [-(-length // block_size) for length in LENGTHS]
        self.table = torch.zeros(len(LENGTHS), max(num_blocks), dtype=torch.int32)
        ids = np.random.default_rng(0).permutation(sum(num_blocks)) + 1
        for row, count in enumerate(num_blocks):
            first = sum(num_blocks[:row])
            self.table[row, :count] = torch.from_numpy(ids[first : first + count])
        self.kv_cache = torch.full((2, sum(num_blocks) + 1, 2, block_size, head_size), float("nan"))

    def step(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Attention of positions start..stop of each (request, start, stop)."""
        heads_THD = torch.cat([self.heads[index][start:stop] for index, start, stop in parts])
        counts = [stop - start for _, start, stop in parts]
        output = self.kernels.attention(
            heads_THD[:, : self.num_heads],
            heads_THD[:, self.num_heads : self.num_heads + 2],
            heads_THD[:, self.num_heads + 2 :],
            self.kv_cache,
            torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            torch.tensor([stop for _, _, stop in parts], dtype=torch.int32),
            self.table[[index for index, _, _ in parts]],
            len(parts),
            block_size=self.block_size,
            scale=0.3,
            sliding_window=self.window,
            soft_cap=None,
        )
        return list(output.split(counts))


@pytest.mark.parametrize("instruction_set", AVAILABLE)
@pytest.mark.parametrize(("group_size", "head_size"), [(1, 64), (3, 20), (8, 16)])
@pytest.mark.parametrize("block_size", [4, 16, 80])
@pytest.mark.parametrize("window", [None, 40])
def test_a_request_has_the_same_bits_alone_in_a_batch_and_in_chunks(
    instruction_set: str, group_size: int, head_size: int, block_size: int, window: int | None
) -> None:
    kernels = load_native_kernels(instruction_set)
    assert kernels is not None
    shape = {"group_size": group_size, "head_size": head_size, "block_size": block_size, "window": window}
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
