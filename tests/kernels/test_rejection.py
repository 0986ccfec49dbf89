"""The rejection rule gives each token its probability; a wrong residual, or a wrong chance to be kept, is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels import rejection
from penstock.kernels.random import gumbel_noise, token_bits
from penstock.kernels.rejection import choose_by_rate, choose_by_rejection, uniform_numbers

NUM_ROWS = 40_000
P = torch.tensor([0.05, 0.4, 0.2, 0.0, 0.25, 0.1])
Q = torch.tensor([0.3, 0.1, 0.2, 0.1, 0.3, 0.0])
# The 0.9999 quantile of chi-square with 4 degrees of freedom: five tokens can be drawn.
LIMIT = 23.5


def draw_with(probs_V: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw as a drafter does: with the random numbers of the target's tokens."""
    noise = gumbel_noise(token_bits(seeds, positions, 0, len(probs_V)))
    return (noise + probs_V.log()).argmax(dim=-1)


def chi_square(token_ids: Tensor, probs_V: Tensor) -> float:
    counts, expected = torch.bincount(token_ids, minlength=len(probs_V)).double(), probs_V.double() * len(token_ids)
    assert not counts[expected == 0].any()
    is_possible = expected > 0
    return float(((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum())


@pytest.fixture
def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Seeds of slots, slots and positions."""
    seeds = torch.arange(NUM_ROWS // 4) * 7919 - 3
    slots = torch.arange(NUM_ROWS) % len(seeds)
    return seeds, slots, torch.arange(NUM_ROWS) // len(seeds) + 5


def outcome(rows: tuple[Tensor, Tensor, Tensor], drafts: Tensor, draft_probs: Tensor | None) -> Tensor:
    seeds, slots, positions = rows
    logits = P.log().expand(NUM_ROWS, -1).contiguous()
    probs = None if draft_probs is None else draft_probs.expand(NUM_ROWS, -1)
    chosen = choose_by_rejection(logits, drafts, probs, seeds, slots, positions)
    assert not chosen.has_failed_R.any()
    return chosen.token_ids_R


def test_drawn_drafts_leave_the_distribution_and_are_kept_as_often_as_can_be(
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    seeds, slots, positions = rows
    drafts = draw_with(Q, seeds[slots], positions)
    tokens = outcome(rows, drafts, Q)
    assert chi_square(tokens, P) < LIMIT
    # The overlap of both, which nothing can exceed.
    assert float((tokens == drafts).double().mean()) == pytest.approx(float(torch.minimum(P, Q).sum()), abs=0.01)
    for draft in range(len(Q)):
        of_draft = drafts == draft
        if of_draft.any():
            kept = float((tokens[of_draft] == draft).double().mean())
            assert kept == pytest.approx(min(1.0, float(P[draft] / Q[draft])), abs=0.03)


@pytest.mark.parametrize("draft", [0, 1, 3])
def test_drafts_that_were_not_drawn_leave_the_distribution(rows: tuple[Tensor, Tensor, Tensor], draft: int) -> None:
    tokens = outcome(rows, torch.full((NUM_ROWS,), draft), None)
    assert chi_square(tokens, P) < LIMIT
    assert float((tokens == draft).double().mean()) == pytest.approx(float(P[draft]), abs=0.01)


def test_drafts_that_were_drawn_may_be_treated_as_if_they_were_not(rows: tuple[Tensor, Tensor, Tensor]) -> None:
    seeds, slots, positions = rows
    assert chi_square(outcome(rows, draw_with(Q, seeds[slots], positions), None), P) < LIMIT


def wrong_residual(residual_LV: Tensor, *arguments: Tensor) -> object:
    """Draws from p itself where a draft is rejected."""
    return _draw(P.log().expand(len(residual_LV), -1).contiguous(), *arguments)


def same_numbers(residual_LV: Tensor, seeds: Tensor, slots: Tensor, positions: Tensor) -> object:
    """Draws the residual with the random numbers of the drafts."""
    return _draw(residual_LV, seeds ^ rejection._RESIDUAL_STREAM, slots, positions)


_draw = rejection.draw_tokens


@pytest.mark.parametrize("wrong", [wrong_residual, same_numbers])
def test_a_wrong_residual_is_noticed(
    rows: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., object]
) -> None:
    seeds, slots, positions = rows
    monkeypatch.setattr(rejection, "draw_tokens", wrong)
    assert chi_square(outcome(rows, draw_with(Q, seeds[slots], positions), Q), P) > 2 * LIMIT


def test_a_row_without_a_distribution_fails() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 0.0]])
    zeros = torch.zeros(2, dtype=torch.int64)
    chosen = choose_by_rejection(logits, zeros, None, torch.tensor([1]), zeros, zeros)
    assert chosen.has_failed_R.tolist() == [True, False]


def test_a_draft_that_is_certain_is_kept() -> None:
    logits = torch.tensor([[0.0, float("-inf"), float("-inf")]]).expand(500, -1).contiguous()
    zeros, positions = torch.zeros(500, dtype=torch.int64), torch.arange(500)
    assert not choose_by_rejection(logits, zeros, None, torch.tensor([1]), zeros, positions).token_ids_R.any()


def test_numbers_are_uniform_and_of_each_seed_and_position() -> None:
    numbers = uniform_numbers(torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200))
    counts = torch.histc(numbers, bins=50, min=0.0, max=1.0)
    assert float(((counts - 800) ** 2 / 800).sum()) < 100.0
    assert len(numbers.unique()) > 39_990


def test_a_rate_keeps_as_many_whatever_they_are() -> None:
    drafts, drawn = torch.randint(0, 9, (NUM_ROWS,)), torch.randint(0, 9, (NUM_ROWS,))
    rates = torch.where(torch.arange(NUM_ROWS) % 2 == 0, 0.8, 0.1).double()
    tokens = choose_by_rate(drawn, drafts, rates, torch.arange(NUM_ROWS), torch.zeros(NUM_ROWS, dtype=torch.int64), 9)
    is_kept = (tokens == drafts).double()
    assert float(is_kept[::2].mean()) == pytest.approx(0.8, abs=0.01)
    assert float(is_kept[1::2].mean()) == pytest.approx(0.1, abs=0.01)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 9
