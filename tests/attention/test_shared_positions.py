"""Decode context parallelism: every rank's heads get attention over the positions of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.attention import (
    AttentionBackend,
    AttentionRows,
    AttentionStep,
    Heads,
    LastRows,
    LayerAttention,
    Projection,
    StepGeometry,
)
from penstock.attention.cpu_native import CpuNativeBackend
from penstock.attention.cpu_paged import CpuPagedBackend
from penstock.attention.select import select_backend
from penstock.contract import FullAttentionSpec
from penstock.errors import UnsupportedFeature, WaitTimeout
from penstock.kernels.native import NATIVE
from penstock.kernels.rotary import TableRotation
from penstock.layers.norm import QueryKeyNorm
from penstock.parallel.context_share import ContextShare
from support.ranks import SilentGroup, run_ranks, shared_memory_groups

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")

BACKENDS = (CpuNativeBackend, CpuPagedBackend)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
# Of each request, the first token of a step and the one after the last.
Step = Sequence[tuple[int, int, int]]


def by_definition(
    query_QHD: np.ndarray,
    key_LD: np.ndarray,
    value_LD: np.ndarray,
    window: int | None,
    soft_cap: float | None,
    run_length: int = 1,
) -> np.ndarray:
    """Attention of the last positions over one KV head, by definition: [Q, H, D]. run_length: as of `Ranks.attend`."""
    scores_HQL = np.einsum("qhd,ld->hql", query_QHD, key_LD) * query_QHD.shape[-1] ** -0.5
    if soft_cap is not None:
        scores_HQL = soft_cap * np.tanh(scores_HQL / soft_cap)
    positions = np.arange(len(key_LD))
    back = positions[-len(query_QHD) :, None] - positions
    hidden = (positions // run_length > positions[-len(query_QHD) :, None] // run_length) | (
        back >= abs(window or len(key_LD))
    )
    if window is not None and window < 0:
        places = np.arange(len(key_LD)) // -window
        hidden |= places[len(key_LD) - len(query_QHD) :, None] != places
    scores_HQL[:, hidden] = -np.inf
    weights_HQL = np.exp(scores_HQL - scores_HQL.max(-1, keepdims=True))
    return np.einsum("hql,ld->qhd", weights_HQL / weights_HQL.sum(-1, keepdims=True), value_LD)


def step_of(
    backend: AttentionBackend,
    layer: LayerAttention,
    rows: AttentionRows,
    cache: Tensor,
    geometry: StepGeometry,
    only_last: bool,
) -> AttentionStep:
    """A step of all tokens, or narrowed to the last token of each request."""
    step = AttentionStep(layer, rows, cache, backend.make_metadata(geometry))
    if not only_last:
        return step
    rows_R = geometry.query_start_loc[1:].long() - 1
    return step._replace(last=LastRows(rows_R, backend.make_metadata(geometry.of_last_tokens(rows_R))))


@dataclass
class Ranks:
    """The requests of these lengths on some ranks, which have `page` positions of each block and `own` query heads."""

    lengths: Sequence[int]
    size: int = 2
    interleave: int = 1
    page: int = 4
    own: int = 3
    head_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    backend: type[AttentionBackend] = CpuNativeBackend
    cache: str = "float32"
    # Blocks that the second request has in common with the first.
    shared_blocks: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        random, self.block_size = np.random.default_rng(5), self.page * self.size
        needed = [-(-length // self.block_size) for length in self.lengths]
        self.num_blocks = 2 + sum(needed)
        ids = (1 + random.permutation(self.num_blocks - 1)).tolist()
        self.table = np.zeros((len(needed), max(needed)), dtype=np.int32)
        for row, count in enumerate(needed):
            self.table[row, :count] = [ids.pop() for _ in range(count)]
        shared = self.shared_blocks * self.block_size
        heads = self.own * self.size
        self.heads = [random.normal(size=(length, heads + 2, self.head_size)) for length in self.lengths]
        if shared:
            self.table[1, : self.shared_blocks] = self.table[0, : self.shared_blocks]
            self.heads[1][:shared, heads:] = self.heads[0][:shared, heads:]
        self.caches: list[Tensor] = []
        self.backends: list[AttentionBackend] = []
        self.layers: list[LayerAttention] = []
        stale = 7.0 if self.backend is CpuPagedBackend else float("nan")
        for group in shared_memory_groups(self.size, timeout_s=20.0):
            is_chunk = self.window is not None and self.window < 0
            layer = LayerAttention(
                "layer", self.own, 1, self.head_size, self.head_size**-0.5, None if is_chunk else self.window,
                self.soft_cap, ContextShare(group, self.interleave),
                chunk_size=-(self.window or 0) if is_chunk else None,
            )  # fmt: skip
            spec = FullAttentionSpec(
                block_size=self.block_size,
                num_kv_heads=1,
                head_size=self.head_size,
                dtype=self.cache,
                num_ranks=self.size,
            )
            memory = torch.full((self.num_blocks * spec.page_size_bytes // 4,), stale).view(torch.uint8)
            backend = self.backend(layer)
            self.layers.append(layer)
            self.backends.append(backend)
            self.caches.append(backend.view_pages(memory.view(self.num_blocks, -1), spec))

    def geometry(self, step: Step) -> StepGeometry:
        counts = [stop - start for _, start, stop in step]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        slots = [
            self.table[request][position // self.block_size] * self.block_size + position % self.block_size
            for request, start, stop in step
            for position in range(start, stop)
        ]
        lengths = [stop for _, _, stop in step]
        return StepGeometry(
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_np=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.from_numpy(self.table[[request for request, _, _ in step]]),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            num_actual_tokens=sum(counts),
            num_actual_reqs=len(step),
            max_query_len=max(counts),
            max_seq_len_upper_bound=max(lengths),
            block_size=self.block_size,
        )

    def given(self, rank: int, step: Step) -> Tensor:
        """The rank's query heads, a key and a value: float32 [T, own + 2, D]."""
        heads = np.concatenate([self.heads[request][start:stop] for request, start, stop in step])
        own = heads[:, rank * self.own : (rank + 1) * self.own]
        return torch.from_numpy(np.concatenate([own, heads[:, -2:]], 1)).float()

    def together(self, run: Callable[[int], Any]) -> list[Any]:
        def on_threads(rank: int) -> Any:
            torch.set_num_threads(self.threads)
            return run(rank)

        results = run_ranks(self.size, on_threads)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def attend(self, step: Step, *, only_last: bool = False, run_length: int = 1) -> Tensor:
        """Attention of all ranks, [T, heads, D]; or of each request's last token.

        run_length: positions, from a multiple of it on, whose tokens see one another.
        """
        geometry, ends = self.geometry(step), None
        if run_length > 1:
            seen = [
                min((position // run_length + 1) * run_length, stop)
                for _, start, stop in step
                for position in range(start, stop)
            ]
            ends = torch.tensor(seen, dtype=torch.int32)

        def run(rank: int) -> Tensor:
            given, backend = self.given(rank, step), self.backends[rank]
            heads = Heads(given[:, : self.own], given[:, self.own : -1], given[:, -1:])
            made = step_of(backend, self.layers[rank], heads, self.caches[rank], geometry, only_last)
            return backend.run(made._replace(visible_ends=ends))

        return torch.cat(self.together(run), 1)

    def expected(self, step: Step, run_length: int = 1) -> Tensor:
        """By definition."""
        outputs = []
        for request, start, stop in step:
            heads = self.heads[request][:stop]
            rows = heads[start:, :-2], heads[:, -2], heads[:, -1]
            outputs.append(by_definition(*rows, self.window, self.soft_cap, run_length))
        return torch.from_numpy(np.concatenate(outputs)).float()


MIXED = (1, 2, 5, 21, 40, 90)


def in_steps(lengths: Sequence[int], known: Sequence[int]) -> tuple[list[Step], Step]:
    """Requests one by one up to what is known of them, and all of the rest at once: few tokens first."""
    before = [[(request, 0, count)] for request, count in enumerate(known) if count]
    rest = [(request, known[request], length) for request, length in enumerate(lengths)]
    return before, sorted(rest, key=lambda part: part[2] - part[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 3, 30, -7])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 4), (3, 2), (4, 1)])
@pytest.mark.each_value_quick
def test_a_mixed_step_equals_the_definition(
    size: int, interleave: int, window: int | None, backend: type[AttentionBackend]
) -> None:
    # Some ranks have nothing of the shortest requests, or of what a window shows.
    ranks = Ranks(MIXED, size, interleave, window=window, backend=backend)
    before, step = in_steps(MIXED, (0, 1, 0, 20, 7, 89))
    for earlier in before:
        torch.testing.assert_close(ranks.attend(earlier), ranks.expected(earlier), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ranks.attend(step), ranks.expected(step), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 3, 30])
def test_tokens_that_see_later_ones(window: int | None, backend: type[AttentionBackend]) -> None:
    ranks = Ranks(MIXED, 2, 2, window=window, backend=backend)
    before, step = in_steps(MIXED, (0, 1, 0, 20, 7, 60))
    for earlier in before:
        ranks.attend(earlier)
    attended = ranks.attend(step, run_length=16)
    torch.testing.assert_close(attended, ranks.expected(step, 16), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("window", "soft_cap", "head_size", "own"), [(None, None, 80, 1), (900, 3.0, 8, 14)])
@pytest.mark.one_case_quick
def test_long_contexts_take_several_chunks(
    window: int | None, soft_cap: float | None, head_size: int, own: int, threads: int, backend: type[AttentionBackend]
) -> None:
    lengths = (2600, 2300)
    ranks = Ranks(
        lengths, 2, 8, page=16, own=own, head_size=head_size, window=window, soft_cap=soft_cap, backend=backend,
        threads=threads,
    )  # fmt: skip
    ranks.heads = [heads * 2 for heads in ranks.heads]
    before, step = in_steps(lengths, (2599, 2180))
    for earlier in before:
        ranks.attend(earlier)
    torch.testing.assert_close(ranks.attend(step), ranks.expected(step), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("cache", "tolerance"), [("bfloat16", 2e-2), ("int8", 3e-2)])
@pytest.mark.parametrize("interleave", [1, 3])
def test_narrow_caches(interleave: int, cache: str, tolerance: float) -> None:
    # An odd number of positions, the last of which is not interleaved in 8 bits.
    ranks = Ranks(MIXED, 2, interleave, page=3, cache=cache)
    before, step = in_steps(MIXED, (0, 1, 0, 20, 7, 89))
    for earlier in before:
        ranks.attend(earlier)
    torch.testing.assert_close(ranks.attend(step), ranks.expected(step), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 4), (3, 2)])
def test_positions_lie_where_the_share_says(size: int, interleave: int, backend: type[AttentionBackend]) -> None:
    ranks = Ranks(MIXED, size, interleave, backend=backend)
    step = [(5, 0, 90)]
    ranks.attend(step)
    for rank, layer in enumerate(ranks.layers):
        assert layer.context is not None
        own, slots = layer.context.slots(ranks.geometry(step).slot_mapping.numpy(), ranks.block_size)
        found = ranks.caches[rank][1][slots // ranks.page, 0, slots % ranks.page]
        assert torch.equal(found, ranks.given(rank, step)[own, -1])


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("cache", DTYPES)
def test_rows_have_the_same_bits_however_steps_are_cut_and_whatever_else_runs(window: int | None, cache: str) -> None:
    lengths = (2400, 700, 300)
    alone = Ranks(lengths, 2, 2, page=16, window=window, cache=cache)
    expected = [alone.attend([(request, 0, length)])[-1:] for request, length in enumerate(lengths)]
    cut = Ranks(lengths, 2, 2, page=16, window=window, cache=cache, threads=2)
    for start, stop in ((0, 111), (111, 112), (112, 299)):
        cut.attend([(request, start, stop) for request in range(3)])
    cut.attend([(1, 299, 699), (0, 299, 2399)])
    found = cut.attend([(request, length - 1, length) for request, length in enumerate(lengths)])
    assert torch.equal(found, torch.cat(expected))


def test_blocks_that_requests_share_are_read_once() -> None:
    lengths = (180, 170)
    found, bits = [], []
    for shared_blocks in (0, 4):
        ranks = Ranks(lengths, 2, 4, page=16, shared_blocks=shared_blocks)
        ranks.heads[1][: 4 * 32, -2:] = ranks.heads[0][: 4 * 32, -2:]
        step = [(1, 169, 170), (0, 179, 180)]
        ranks.attend([(0, 0, 179)])
        ranks.attend([(1, shared_blocks * 32, 169)])
        found.append(ranks.attend(step))
        bits.append(ranks.attend(step[:1]))
        torch.testing.assert_close(found[-1], ranks.expected(step), atol=1e-5, rtol=1e-5)
    assert torch.equal(found[0], found[1])
    assert torch.equal(bits[1], found[1][:1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_last_tokens_alone(backend: type[AttentionBackend]) -> None:
    step = [(0, 0, 1), (1, 0, 2), (3, 0, 21), (4, 0, 40)]
    every = Ranks(MIXED, 3, 2, backend=backend).attend(step)
    last = Ranks(MIXED, 3, 2, backend=backend).attend(step, only_last=True)
    torch.testing.assert_close(last, every[[0, 2, 23, 63]], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_normalised_and_turned_as_by_one_rank(has_norm: bool, only_last: bool) -> None:
    """Beside a backend that leaves both to torch."""
    step = [(0, 0, 1), (1, 0, 2), (3, 0, 21)]
    positions = torch.tensor([0, *range(2), *range(21)])
    angles = torch.arange(21)[:, None] * torch.rand(8, generator=torch.Generator().manual_seed(2))
    rotation = TableRotation(torch.cat((angles.cos(), angles.sin()), 1), positions)
    found = []
    for backend_class in BACKENDS:
        ranks = Ranks(MIXED, 2, 2, backend=backend_class)
        norm = QueryKeyNorm(num_heads=3, num_kv_heads=1, head_size=16, eps=1e-5) if has_norm else None
        if norm is not None:
            norm.weight.copy_(torch.tensor([0.7] * 3 + [1.3])[:, None].expand_as(norm.weight))
        geometry = ranks.geometry(step)

        def run(rank: int, ranks: Ranks = ranks, norm: Any = norm, geometry: Any = geometry) -> Tensor:
            backend = ranks.backends[rank]
            projection = Projection(ranks.given(rank, step).flatten(1), norm, rotation)
            cache = ranks.caches[rank]
            return backend.run(step_of(backend, ranks.layers[rank], projection, cache, geometry, only_last))

        found.append(torch.cat(ranks.together(run), 1))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = Ranks(MIXED, 2)
    group = shared_memory_groups(2, timeout_s=0.05)[0]
    layer = replace(ranks.layers[0], context=ContextShare(group, 1))
    backend = CpuNativeBackend(layer)
    given = ranks.given(0, [(1, 0, 2)])
    heads = Heads(given[:, :3], given[:, 3:4], given[:, 4:])
    one = step_of(backend, layer, heads, ranks.caches[0], ranks.geometry([(1, 0, 2)]), only_last=False)
    with pytest.raises(WaitTimeout, match=r"Rank 0 waited 0.05 s in attention \(call 1 .* for rank 1"):
        backend.run(one)


def test_which_backend_shares_positions() -> None:
    def chosen(group: Any, dtype: torch.dtype, requested: str | None = None) -> str:
        layer = LayerAttention("layer", 2, 1, 16, 0.25, context=ContextShare(group, 1))
        where = {"device": torch.device("cpu"), "block_size": 16, "candidates": ("cpu_native", "cpu_paged")}
        return select_backend(layer, dtype=dtype, requested=requested, **where)[0].name

    group = shared_memory_groups(2)[0]
    assert chosen(group, torch.int8) == "cpu_native"
    assert chosen(group, torch.float32, "cpu_paged") == "cpu_paged"
    # Ranks without shared memory in common.
    assert chosen(SilentGroup(0, 2), torch.float32) == "cpu_paged"
    with pytest.raises(UnsupportedFeature, match="reference: it does not support decode_context_parallel_size=2"):
        chosen(group, torch.float32, "reference")
    with pytest.raises(UnsupportedFeature, match="no shared memory in common; cpu_paged: it does not"):
        chosen(SilentGroup(0, 2), torch.int8)
