"""Attention in both directions over the texts of a step equals that of each text by itself."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.attention import AttentionStep, LastRows, LayerAttention, Projection, SequenceGeometry
from penstock.attention.whole_texts import WholeTextsBackend, attend_text
from penstock.kernels.native import NATIVE
from penstock.kernels.native.attention import HeadPreparation, HeadShape, StepRequests
from penstock.kernels.rotary import TableRotation, apply_rotary, gather_rotation_reference

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")
LENGTHS = (3, 1, 19, 42, 102, 7, 66)


class Case(NamedTuple):
    """window: visible positions on either side, the current one included."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    soft_cap: float | None = None


CASES = [Case(4, 4, 8, None), Case(4, 4, 8, 9), Case(4, 2, 16, 5), Case(6, 1, 32, 33), Case(4, 4, 8, 9, 2.0)]
# A head that is no multiple of any vector.
CASES.append(Case(2, 2, 36, None))


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Projections of all texts, their positions, and a rotary table."""
    torch.manual_seed(0)
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_size
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    angles = torch.rand(max(LENGTHS), case.head_size // 2)
    return torch.randn(sum(LENGTHS), width), positions_T, torch.cat((angles.cos(), angles.sin()), -1)


def attend(case: Case, qkv_TX: Tensor, positions_T: Tensor, lengths: tuple[int, ...], table_PR: Tensor) -> Tensor:
    assert NATIVE is not None
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    requests = StepRequests.without_blocks(starts, torch.tensor(lengths, dtype=torch.int32), len(lengths))
    window = None if case.window is None else case.window - 1
    scale = case.head_size**-0.5
    shape = HeadShape(case.num_heads, case.num_kv_heads, case.head_size, 1, scale, window, case.soft_cap)
    preparation = HeadPreparation(positions_T.contiguous(), table_PR)
    return NATIVE.attention.whole_texts(qkv_TX.clone(), requests, shape, preparation)


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_the_specification(case: Case) -> None:
    qkv_TX, positions_T, table_PR = inputs(case)
    found_TX = attend(case, qkv_TX, positions_T, LENGTHS, table_PR)
    num_heads, num_kv_heads, scale = case.num_heads, case.num_kv_heads, case.head_size**-0.5
    layer = LayerAttention("layer", num_heads, num_kv_heads, case.head_size, scale, case.window, case.soft_cap)
    heads_THD = qkv_TX.clone().unflatten(-1, (-1, case.head_size))
    rotation = gather_rotation_reference(table_PR, positions_T, torch.float32)
    apply_rotary(heads_THD[:, : num_heads + num_kv_heads], rotation)
    for begin, end in itertools.pairwise([0, *itertools.accumulate(LENGTHS)]):
        query, key, value = heads_THD[begin:end].split((num_heads, num_kv_heads, num_kv_heads), 1)
        torch.testing.assert_close(
            found_TX[begin:end], attend_text(layer, query, key, value).flatten(1), atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("case", CASES)
def test_a_text_has_the_same_bits_alone_and_in_a_batch(case: Case) -> None:
    qkv_TX, positions_T, table_PR = inputs(case)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together_TX = attend(case, qkv_TX, positions_T, LENGTHS, table_PR)
        for begin, end in itertools.pairwise([0, *itertools.accumulate(LENGTHS)]):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                alone_TX = attend(case, qkv_TX[begin:end], positions_T[begin:end], (end - begin,), table_PR)
                assert torch.equal(alone_TX, together_TX[begin:end])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("case", CASES)
def test_heads_a_projection_and_last_tokens_give_the_same_attention(case: Case) -> None:
    qkv_TX, positions_T, table_PR = inputs(case)
    starts = np.array([0, *itertools.accumulate(LENGTHS)])
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    sequences = SequenceGeometry(
        torch.from_numpy(starts).int(), starts, lengths, len(qkv_TX), len(LENGTHS), max(LENGTHS)
    )
    heads = case.num_heads, case.num_kv_heads, case.head_size
    layer = LayerAttention("layer", *heads, case.head_size**-0.5, case.window, case.soft_cap, is_causal=False)
    backend = WholeTextsBackend()
    projection = Projection(qkv_TX.clone(), None, TableRotation(table_PR, positions_T))
    step = AttentionStep(layer, projection, torch.empty(0), backend.make_metadata(sequences))
    found_TX = backend.run(step)
    of_heads_THD = backend.run(step._replace(rows=projection._replace(qkv_TX=qkv_TX.clone()).heads(layer)))
    torch.testing.assert_close(of_heads_THD.flatten(1), found_TX, atol=2e-5, rtol=1e-4)
    rows_R = torch.from_numpy(starts[1:] - 1)
    narrowed = step._replace(rows=projection._replace(qkv_TX=qkv_TX.clone()), last=LastRows(rows_R, None))
    assert torch.equal(backend.run(narrowed), found_TX[rows_R])
