"""Differences of scores against torch's definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penstock.bench.quality.scores import TokenScore, compare, divergence, loss


def _distributions(seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(12, 40, generator=random, dtype=torch.float64)
    other = logits + noise * torch.randn(12, 40, generator=random, dtype=torch.float64)
    return logits.log_softmax(dim=1), other.log_softmax(dim=1)


def _likeliest(row: torch.Tensor, count: int) -> dict[int, float]:
    values, ids = row.topk(count)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("noise", [0.0, 0.1, 2.0])
def test_divergence_of_all_tokens_is_the_kl_divergence(noise: float) -> None:
    for before, after in zip(*_distributions(1, noise), strict=True):
        expected = float(F.kl_div(after, before, reduction="sum", log_target=True))
        assert divergence(_likeliest(before, 40), _likeliest(after, 40)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("count", [1, 5, 20])
def test_divergence_of_the_most_likely_tokens_is_a_lower_bound(count: int) -> None:
    for before, after in zip(*_distributions(2, 1.0), strict=True):
        whole = float(F.kl_div(after, before, reduction="sum", log_target=True))
        assert 0 <= divergence(_likeliest(before, count), _likeliest(after, count)) <= whole + 1e-9


def test_distributions_without_a_common_token_diverge_by_nothing_that_is_known() -> None:
    assert divergence({1: -0.1}, {2: -0.1}) == 0


def test_comparison_counts_every_position_once() -> None:
    reference = [TokenScore(-1.0, {3: -0.2, 4: -2.0}), TokenScore(-2.0, {5: -0.5, 6: -1.5})]
    other = [TokenScore(-1.5, {4: -0.3, 3: -1.5}), TokenScore(-1.8, {5: -0.6, 6: -1.4})]
    found = compare(other, reference)
    assert loss(reference) == 1.5
    assert found.loss_change == pytest.approx(3.3 / 3.0 - 1)
    assert found.mean_change == pytest.approx(0.35)
    assert found.same_top == 0.5
    assert found.kl > 0
