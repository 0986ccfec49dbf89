"""Requests that share the blocks of a common prefix: each has the same bits as alone in a cache of its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.native import NativeKernels, load_native_kernels
from penstock.kernels.native.attention import HeadShape, StepRequests
from support.instruction_sets import AVAILABLE, needs_native_kernels
from support.kv_caches import KV_CACHES

pytestmark = needs_native_kernels
NUM_KV_HEADS, HEAD_SIZE = 2, 24


@dataclass(frozen=True)
class Sharer:
    """Has the first `shared_blocks` blocks of another request, and so many positions of its own.

    num_new: of these, those that the step computes; the others are in the cache before.
    """

    parent: int
    shared_blocks: int
    own: int
    num_new: int


class Requests:
    """Random requests over one paged cache; request 0 shares no blocks and has `first` positions."""

    def __init__(
        self, instruction_set: str, first: int, first_new: int, sharers: list[Sharer], *,
        block_size: int, group_size: int, window: int | None, cache: str,
    ) -> None:  # fmt: skip
        kernels = load_native_kernels(instruction_set)
        assert kernels is not None
        self.kernels: NativeKernels = kernels
        self.dtype, layout = KV_CACHES[cache]
        self.block_size = block_size
        sizes = NUM_KV_HEADS * group_size, NUM_KV_HEADS, HEAD_SIZE, block_size
        self.shape = HeadShape(*sizes, 0.3, window, None, bfloat16_layout=layout)
        generator = torch.Generator().manual_seed(5)
        self.heads: list[Tensor] = []
        self.blocks: list[list[int]] = []
        self.starts: list[int] = []
        self.num_blocks = 1
        for number, sharer in enumerate([Sharer(0, 0, first, first_new), *sharers]):
            if number == 0:
                heads, blocks = torch.empty(0, NUM_KV_HEADS * (group_size + 2), HEAD_SIZE), []
            else:
                parent = min(sharer.parent, number - 1)
                length = self.heads[parent].shape[0]
                # What a single token fills is not shared in the same step.
                num_shared = min(sharer.shared_blocks, (length - (length - self.starts[parent] == 1)) // block_size)
                heads = self.heads[parent][: num_shared * block_size]
                blocks = self.blocks[parent][:num_shared]
            own = torch.randn(sharer.own, *heads.shape[1:], generator=generator)
            self.heads.append(torch.cat([heads, own]))
            needed = -(-(heads.shape[0] + sharer.own) // block_size) - len(blocks)
            self.blocks.append([*blocks, *range(self.num_blocks, self.num_blocks + needed)])
            self.num_blocks += needed
            self.starts.append(heads.shape[0] + sharer.own - min(sharer.num_new, sharer.own))

    def cache(self) -> Tensor:
        # What was in memory before is not a number; neither is an int8 block's scale of four bytes of -1.
        width, stale = (HEAD_SIZE + 4, -1) if self.dtype is torch.int8 else (HEAD_SIZE, float("nan"))
        return torch.full((2, self.num_blocks, NUM_KV_HEADS, self.block_size, width), stale, dtype=self.dtype)

    def step(self, kv_cache: Tensor, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Attention of positions start..stop of each (request, start, stop)."""
        counts = [stop - start for _, start, stop in parts]
        heads_THD = torch.cat([self.heads[number][start:stop] for number, start, stop in parts])
        table = torch.zeros(len(parts), max(map(len, self.blocks)), dtype=torch.int32)
        for row, (number, _, _) in enumerate(parts):
            table[row, : len(self.blocks[number])] = torch.tensor(self.blocks[number])
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        seq_lens = torch.tensor([stop for _, _, stop in parts], dtype=torch.int32)
        requests = StepRequests.of(starts, seq_lens, table, len(parts))
        num_heads = self.shape.num_heads
        parts_of_heads = heads_THD.split([num_heads, NUM_KV_HEADS, NUM_KV_HEADS], 1)
        return list(self.kernels.attention(*parts_of_heads, kv_cache, requests, self.shape).split(counts))

    def together(self) -> list[Tensor]:
        """Result of the last step for each request, with all of them in it."""
        kv_cache = self.cache()
        for number, start in enumerate(self.starts):
            # What it shares, its parent has written, or writes in the step that is looked at.
            if start > 0:
                self.step(kv_cache, [(number, 0, start)])
        for number, start in enumerate(self.starts):
            stop = self.heads[number].shape[0]
            self._spoil(kv_cache, number, start, stop)
        parts = [(number, start, self.heads[number].shape[0]) for number, start in enumerate(self.starts)]
        order = sorted(range(len(parts)), key=lambda number: parts[number][2] - parts[number][1])
        outputs = self.step(kv_cache, [parts[number] for number in order])
        return [outputs[order.index(number)] for number in range(len(parts))]

    def alone(self, number: int) -> Tensor:
        length = self.heads[number].shape[0]
        return self.step(self.cache(), [(number, 0, length)])[0][self.starts[number] :]

    def _spoil(self, kv_cache: Tensor, number: int, start: int, stop: int) -> None:
        """Poison the positions that the step computes: they may not be read before they are written."""
        size = self.block_size * HEAD_SIZE
        for position in range(start, stop):
            block, offset = self.blocks[number][position // self.block_size], position % self.block_size
            keys, values = kv_cache[0, block].view(NUM_KV_HEADS, -1), kv_cache[1, block].view(NUM_KV_HEADS, -1)
            if self.dtype is torch.int8:  # the scales
                keys[:, size:].view(torch.float32)[:, offset] = torch.nan
                values[:, size:].view(torch.float32)[:, offset] = torch.nan
            else:
                keys.view(NUM_KV_HEADS, HEAD_SIZE, self.block_size)[:, :, offset] = torch.nan
                values.view(NUM_KV_HEADS, self.block_size, HEAD_SIZE)[:, offset] = torch.nan


def assert_same_bits_as_alone(requests: Requests) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [requests.alone(number) for number in range(len(requests.heads))]
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for number, output in enumerate(requests.together()):
                assert torch.equal(output, alone[number]), f"request {number} on {num_threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("instruction_set", AVAILABLE)
@pytest.mark.parametrize("cache", KV_CACHES)
@pytest.mark.parametrize("window", [None, 70, -300])
@pytest.mark.each_value_quick
def test_decodes_over_a_shared_prompt(instruction_set: str, cache: str, window: int | None) -> None:
    sharers = [Sharer(0, 12, own, 1) for own in (1, 2, 17, 16, 40, 33, 5, 5, 8, 21, 64, 65, 66, 30)]
    options = {"block_size": 16, "group_size": 2, "window": window, "cache": cache}
    assert_same_bits_as_alone(Requests(instruction_set, 200, 1, sharers, **options))


@pytest.mark.parametrize("instruction_set", AVAILABLE)
@pytest.mark.parametrize("cache", KV_CACHES)
@pytest.mark.each_value_quick
def test_prompts_that_read_what_another_one_writes_in_the_same_step(instruction_set: str, cache: str) -> None:
    sharers = [Sharer(0, 12, own, own) for own in (1, 1, 2, 17, 16, 40, 1, 90)] + [Sharer(8, 14, 3, 3)]
    options = {"block_size": 16, "group_size": 3, "window": None, "cache": cache}
    assert_same_bits_as_alone(Requests(instruction_set, 200, 200, sharers, **options))


@settings(max_examples=60, deadline=None)
@given(
    sharers=st.lists(
        st.builds(
            Sharer, st.integers(0, 9), st.integers(0, 90), st.integers(1, 50), st.sampled_from([1, 1, 1, 2, 7, 60])
        ),
        max_size=12,
    ),
    first=st.sampled_from([3, 64, 130, 256, 1100]),
    first_new=st.sampled_from([1, 2, 40, 2000]),
    block_size=st.sampled_from([1, 16, 24, 80]),
    group_size=st.sampled_from([1, 2, 8, 30]),
    window=st.sampled_from([None, None, 20, 100, -150]),
)
@pytest.mark.slow
def test_trees_of_prefixes(sharers: list[Sharer], first: int, first_new: int, **options: int | None) -> None:
    """Prefixes of any length, some of them of others' own positions, in steps of decodes and chunks."""
    assert_same_bits_as_alone(Requests(AVAILABLE[0], first, first_new, sharers, cache="float32", **options))  # type: ignore[arg-type]
