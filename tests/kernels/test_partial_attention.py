"""Attention over parts of the positions, weighed and added, is attention over all of them: by definition, in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels import paged_attention
from penstock.kernels.paged_attention import (
    decode_attention_part,
    list_blocks_between,
    prefill_attention_part,
    weigh_part,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 6, 2, 8


def by_definition(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, first: int, end: int, soft_cap: float | None
) -> np.ndarray:
    """One query [H, D] over positions first .. end, in float64."""
    output = np.zeros(query.shape)
    for head in range(NUM_HEADS):
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        scores = key[first:end, kv_head] @ query[head] * 0.5
        if soft_cap is not None:
            scores = np.tanh(scores / soft_cap) * soft_cap
        weights = np.exp(scores - scores.max())
        output[head] = weights / weights.sum() @ value[first:end, kv_head]
    return output


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("max_scores", [1 << 20, 1])
def test_parts_add_up(
    soft_cap: float | None, window: int | None, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "_MAX_SCORES", max_scores)
    random = np.random.default_rng(3)
    # Scores far from zero, which overflow unless they are taken relative to something.
    query = random.normal(size=(9, NUM_HEADS, HEAD_SIZE)).astype(np.float32) * 30
    key, value = random.normal(size=(2, 20, NUM_KV_HEADS, HEAD_SIZE)).astype(np.float32)
    ends = np.arange(12, 21)
    firsts = np.zeros(9, dtype=np.int64) if window is None else ends - window
    parts = []
    for rank in range(3):
        mine = np.arange(rank, 20, 3)
        bounds = (torch.from_numpy(np.searchsorted(mine, bound)) for bound in (firsts, ends))
        tensors = (torch.from_numpy(array) for array in (query, key[mine], value[mine]))
        parts.append(prefill_attention_part(*tensors, *bounds, 0.5, soft_cap))
    lse = torch.stack([lse for _, lse in parts])
    found = sum(weigh_part(output, lse_of_part, lse) for output, lse_of_part in parts)
    expected = [by_definition(query[i], key, value, firsts[i], ends[i], soft_cap) for i in range(9)]
    np.testing.assert_allclose(np.asarray(found), expected, atol=2e-5)


def test_what_sees_nothing_weighs_nothing() -> None:
    query, key = torch.ones(1, NUM_HEADS, HEAD_SIZE), torch.ones(3, NUM_KV_HEADS, HEAD_SIZE)
    nothing = torch.tensor([2])
    output, lse = prefill_attention_part(query, key, key, nothing, nothing, 0.5)
    assert not output.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_batch_of_single_tokens_is_as_each_by_itself(soft_cap: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(2, 12, NUM_KV_HEADS, 4, HEAD_SIZE, generator=generator)
    query = torch.randn(3, NUM_HEADS, HEAD_SIZE, generator=generator) * 10
    table = np.array([[3, 1, 5], [2, 7, 4], [9, 10, 11]], dtype=np.int32)
    first, end = np.array([0, 5, 2]), np.array([10, 8, 3])
    blocks = list_blocks_between(table, first, end, 4)
    workspace = torch.empty_like(cache[0]), torch.empty_like(cache[0])
    output, lse = decode_attention_part(query, cache[0], cache[1], blocks, 0.5, workspace, soft_cap)
    for request in range(3):
        key, value = cache[:, table[request].tolist()].transpose(2, 3).flatten(1, 2)
        bounds = torch.from_numpy(first[request : request + 1]), torch.from_numpy(end[request : request + 1])
        expected = prefill_attention_part(query[request : request + 1], key, value, *bounds, 0.5, soft_cap)
        torch.testing.assert_close((output[request], lse[request]), (expected[0][0], expected[1][0]))
