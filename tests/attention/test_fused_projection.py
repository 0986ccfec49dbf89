"""Attention fused with norm and rotary embedding, against the separate specifications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.attention import AttentionBackend, AttentionStep, LayerAttention, Projection, StepGeometry
from penstock.attention.cpu_native import CpuNativeBackend
from penstock.attention.reference import ReferenceBackend
from penstock.contract import FullAttentionSpec
from penstock.kernels.native import NATIVE
from penstock.kernels.norm import rms_norm_reference
from penstock.kernels.rotary import TableRotation, gather_rotation_reference, rotary_table
from penstock.kernels.step_state import compute_slot_mapping

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")
BLOCK_SIZE = 4
# (positions before the step, positions in it)
STEP = [(0, 1), (9, 1), (70, 1), (4, 2), (0, 6), (31, 13), (0, 40)]


def new_cache(backend: AttentionBackend, num_blocks: int, num_kv_heads: int, head_size: int) -> Tensor:
    """A cache of zeros as the backend sees it."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads, head_size=head_size, dtype="float32")
    return backend.view_pages(torch.zeros(num_blocks, spec.page_size_bytes, dtype=torch.uint8), spec)


class Norm:
    """A norm by its specification; `is_plain` says that it is no more than that."""

    def __init__(self, weight_HD: Tensor, eps: float, *, is_plain: bool, follows_rotation: bool = False) -> None:
        self.weight_HD, self.eps, self.is_plain = weight_HD, eps, is_plain
        self.follows_rotation = follows_rotation

    @property
    def rms_of_each_head(self) -> tuple[Tensor, float] | None:
        return (self.weight_HD, self.eps) if self.is_plain else None

    def __call__(self, query_key_THD: Tensor) -> Tensor:
        return rms_norm_reference(query_key_THD, self.weight_HD, self.eps)


def _geometry(parts: Sequence[tuple[int, int]], num_padding: int) -> StepGeometry:
    """Request i has the blocks that follow those of i - 1, from 1 on."""
    counts = [count for _, count in parts]
    lengths = [before + count for before, count in parts]
    table = torch.zeros(len(parts), max(-(-length // BLOCK_SIZE) for length in lengths), dtype=torch.int32)
    taken = 1
    for row, length in enumerate(lengths):
        needed = -(-length // BLOCK_SIZE)
        table[row, :needed] = torch.arange(taken, taken + needed)
        taken += needed
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = torch.arange(len(parts))
    owners = torch.repeat_interleave(rows, torch.tensor(counts))
    owners = torch.cat([owners, torch.zeros(num_padding, dtype=torch.int64)])
    return StepGeometry(
        query_start_loc=torch.from_numpy(starts).int(),
        query_start_loc_np=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=compute_slot_mapping(table, rows, owners, _positions(parts, num_padding), BLOCK_SIZE, sum(counts)),
        num_actual_tokens=sum(counts),
        num_actual_reqs=len(parts),
        max_query_len=max(counts),
        max_seq_len_upper_bound=max(lengths),
        block_size=BLOCK_SIZE,
    )


def _positions(parts: Sequence[tuple[int, int]], num_padding: int) -> Tensor:
    return torch.tensor([p for before, count in parts for p in range(before, before + count)] + [0] * num_padding)


@pytest.mark.parametrize("order", [None, "norm first", "norm last"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "rotated"), [(4, 2, 16, 16), (3, 1, 20, 20), (2, 2, 32, 12)]
)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, 3.0)])
@pytest.mark.parametrize("num_padding", [0, 3])
def test_it_is_norm_rotation_and_attention(
    order: str | None,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    rotated: int,
    window: int | None,
    soft_cap: float | None,
    num_padding: int,
) -> None:
    generator = torch.Generator().manual_seed(5)
    layer = LayerAttention("layer", num_heads, num_kv_heads, head_size, 0.2, window, soft_cap)
    weight_HD = torch.randn(num_heads + num_kv_heads, head_size, generator=generator)
    norm = Norm(weight_HD, 1e-5, is_plain=True, follows_rotation=order == "norm last") if order else None
    table_PR = rotary_table(1.0 / 100 ** torch.linspace(0, 1, rotated // 2), 100, 1.0)
    outputs = []
    for backend_class in (ReferenceBackend, CpuNativeBackend):
        backend: AttentionBackend = backend_class(layer)
        kv_cache = new_cache(backend, 100, num_kv_heads, head_size)
        rows = torch.Generator().manual_seed(6)

        def run(
            parts: Sequence[tuple[int, int]],
            geometry: StepGeometry,
            backend: AttentionBackend = backend,
            kv_cache: Tensor = kv_cache,
            rows: torch.Generator = rows,
            padding: int = 0,
        ) -> Tensor:
            positions_T = _positions(parts, padding)
            width = (num_heads + 2 * num_kv_heads) * head_size
            qkv_TX = torch.randn(len(positions_T), width, generator=rows)
            is_native = isinstance(backend, CpuNativeBackend)
            rotation = (
                TableRotation(table_PR, positions_T)
                if is_native
                else gather_rotation_reference(table_PR, positions_T, torch.float32)
            )
            projection = Projection(qkv_TX, norm, rotation)
            return backend.run(AttentionStep(layer, projection, kv_cache, backend.make_metadata(geometry)))

        whole = _geometry(STEP, num_padding)
        for index, (before, _) in enumerate(STEP):
            if before:
                run([(0, before)], _shifted(_geometry([(0, before)], 0), int(whole.block_table[index, 0]) - 1))
        outputs.append(run(STEP, whole, padding=num_padding))
    expected, actual = outputs
    num_tokens = sum(count for _, count in STEP)
    torch.testing.assert_close(actual[:num_tokens], expected[:num_tokens], rtol=2e-5, atol=2e-5)
    assert torch.isfinite(actual).all()


def _shifted(geometry: StepGeometry, blocks: int) -> StepGeometry:
    return replace(
        geometry,
        block_table=geometry.block_table + blocks,
        slot_mapping=geometry.slot_mapping + blocks * BLOCK_SIZE,
    )


def test_a_norm_that_is_more_than_that_goes_the_plain_way() -> None:
    layer = LayerAttention("layer", 2, 2, 16, 0.25)
    backend = CpuNativeBackend(layer)
    table_PR = rotary_table(torch.ones(8), 100, 1.0)
    geometry = _geometry([(0, 5)], 0)
    qkv_TX = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    results = []
    for is_plain in (True, False):
        norm = Norm(torch.full((4, 16), 1.5), 1e-6, is_plain=is_plain)
        kv_cache = new_cache(backend, 4, 2, 16)
        rotation = TableRotation(table_PR, torch.arange(5))
        projection = Projection(qkv_TX.clone(), norm, rotation)
        results.append(backend.run(AttentionStep(layer, projection, kv_cache, backend.make_metadata(geometry))))
    torch.testing.assert_close(results[0], results[1])
