"""Sampling kernels against numpy, and the drawn tokens against the exact distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.kernels import sampling
from penstock.kernels.random import gumbel_noise, token_bits
from penstock.kernels.sampling import (
    draw_tokens_reference,
    greedy_tokens,
    mask_min_p_reference,
    mask_top_k_top_p_reference,
    top_logprobs,
)

_logits = hnp.arrays(np.float32, st.tuples(st.just(1), st.integers(1, 40)), elements=st.floats(-8, 8, width=32))


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    return shifted / shifted.sum()


def _kept(masked: torch.Tensor) -> set[int]:
    return set(torch.isfinite(masked[0]).nonzero().flatten().tolist())


@settings(max_examples=200, deadline=None)
@given(logits=_logits, top_k=st.integers(1, 50))
def test_top_k_keeps_the_k_largest_and_their_ties(logits: np.ndarray, top_k: int) -> None:
    vocab_size = logits.shape[1]
    top_k = min(top_k, vocab_size)
    masked = mask_top_k_top_p_reference(torch.from_numpy(logits.copy()), torch.tensor([top_k]), torch.tensor([1.0]))
    threshold = np.sort(logits[0])[::-1][top_k - 1]
    assert _kept(masked) == set(np.flatnonzero(logits[0] >= threshold).tolist())


@settings(max_examples=200, deadline=None)
@given(logits=_logits, top_p=st.floats(0.05, 0.999))
def test_top_p_keeps_the_smallest_set_that_holds_the_mass(logits: np.ndarray, top_p: float) -> None:
    vocab_size = logits.shape[1]
    masked = mask_top_k_top_p_reference(
        torch.from_numpy(logits.copy()), torch.tensor([vocab_size]), torch.tensor([top_p])
    )
    kept = _kept(masked)
    probs = _softmax(logits[0])
    weakest = min(logits[0, token] for token in kept)
    assert kept == {token for token in range(vocab_size) if logits[0, token] >= weakest}
    assert probs[list(kept)].sum() > top_p - 1e-5
    without_weakest = [token for token in kept if logits[0, token] > weakest]
    assert probs[without_weakest].sum() < top_p + 1e-5


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_keeps_no_token_beyond_the_one_that_reaches_the_mass(top_p: float, num_kept: int) -> None:
    # So close that each has exactly a quarter, and still no two tie.
    logits = torch.tensor([[1e-9, 3e-9, 0.0, 2e-9]])
    assert logits.softmax(dim=-1).tolist() == [[0.25] * 4]
    masked = mask_top_k_top_p_reference(logits, torch.tensor([4]), torch.tensor([top_p]))
    assert len(_kept(masked)) == num_kept


@settings(max_examples=200, deadline=None)
@given(logits=_logits, min_p=st.floats(0.0, 1.0))
def test_min_p_keeps_what_is_likely_beside_the_best(logits: np.ndarray, min_p: float) -> None:
    masked = mask_min_p_reference(torch.from_numpy(logits.copy()), torch.tensor([min_p], dtype=torch.float32))
    probs = _softmax(logits[0])
    for token, is_kept in enumerate(torch.isfinite(masked[0]).tolist()):
        ratio = probs[token] / probs.max()
        if abs(ratio - min_p) > 1e-5:
            assert is_kept == (ratio > min_p)


def test_neutral_parameters_change_nothing() -> None:
    logits = torch.randn(4, 1000)
    same = mask_top_k_top_p_reference(logits.clone(), torch.full((4,), 1000), torch.ones(4))
    assert torch.equal(same, logits)
    assert torch.equal(mask_min_p_reference(logits.clone(), torch.zeros(4)), logits)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("top_k", [50, 7])
@pytest.mark.each_value_quick
def test_drawn_tokens_follow_the_exact_distribution(top_k: int, top_p: float) -> None:
    num_draws, vocab_size = 200_000, 50
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, vocab_size, generator=generator) * 1.5
    masked = mask_top_k_top_p_reference(logits.clone(), torch.tensor([top_k]), torch.tensor([top_p]))
    seeds, positions = torch.full((num_draws,), 17), torch.arange(num_draws)
    drawn = draw_tokens_reference(masked.expand(num_draws, -1), seeds, positions).token_ids_R
    expected = _softmax(masked[0].numpy()) * num_draws
    counts = np.bincount(drawn.numpy(), minlength=vocab_size)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_squared = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    degrees = possible.sum() - 1
    assert chi_squared < degrees + 5 * np.sqrt(2 * degrees)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]]).expand(1000, -1)
    drawn = draw_tokens_reference(logits, torch.arange(1000), torch.zeros(1000, dtype=torch.int64))
    assert set(drawn.token_ids_R.tolist()) == {1, 3}
    assert not drawn.has_failed_R.any()


@pytest.mark.parametrize("numbers_at_once", [1, 3 * 200, 1 << 20])
def test_a_draw_does_not_depend_on_how_much_is_looked_at_at_once(
    numbers_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, seeds, positions = torch.randn(3, 1000), torch.arange(3), torch.arange(3)
    noise = gumbel_noise(token_bits(seeds, positions, 0, 1000))
    monkeypatch.setattr(sampling, "_NUMBERS_AT_ONCE", numbers_at_once)
    drawn = draw_tokens_reference(logits, seeds, positions)
    assert torch.equal(drawn.token_ids_R, (noise + logits).argmax(dim=-1))


@pytest.mark.parametrize(("noise", "least"), [(0.3, 0.8), (0.7, 0.62)])
def test_distributions_that_are_alike_draw_alike(noise: float, least: float) -> None:
    """Acceptance of drafts drawn with the same random numbers is far above chance, which is below 0.1."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(400, 8000, generator=generator) * 2.5
    drafter = logits + torch.randn(400, 8000, generator=generator) * noise
    seeds, positions = torch.arange(400), torch.zeros(400, dtype=torch.int64)
    tokens, drafts = (draw_tokens_reference(of, seeds, positions).token_ids_R for of in (logits, drafter))
    others = draw_tokens_reference(drafter, seeds, positions + 1).token_ids_R
    assert (tokens == drafts).double().mean() > least
    assert (tokens == others).double().mean() < 0.15


def test_logprobs_equal_log_softmax_and_ranks_count_from_one() -> None:
    logits = torch.randn(5, 100)
    sampled = torch.tensor([3, 99, 0, 50, int(logits[4].argmax())])
    result = top_logprobs(logits, sampled, 4)
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert torch.allclose(result.logprobs_RN.double(), expected.gather(-1, result.token_ids_RN), atol=1e-6)
    assert torch.equal(result.token_ids_RN[:, 0], sampled)
    assert torch.equal(result.token_ids_RN[:, 1:], logits.topk(4).indices)
    order = logits.argsort(dim=-1, descending=True)
    for row in range(5):
        assert result.ranks_R[row] == (order[row] == sampled[row]).nonzero().item() + 1


def test_tokens_that_tie_have_the_rank_of_the_last_of_them() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0]).expand(5, -1)
    assert top_logprobs(logits, torch.arange(5), 1).ranks_R.tolist() == [4, 1, 3, 3, 5]


def test_no_top_logprobs_still_gives_the_sampled_ones() -> None:
    assert top_logprobs(torch.randn(2, 10), torch.tensor([1, 2]), 0).logprobs_RN.shape == (2, 1)


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [-1.0, float("-inf"), -2.0], [5.0, 5.0, 5.0]])
    assert greedy_tokens(logits).token_ids_R.tolist() == [1, 0, 0]
    wide = torch.randn(7, 5000)
    assert torch.equal(greedy_tokens(wide).token_ids_R, wide.argmax(dim=-1))


def test_rows_without_a_token_that_could_be_chosen_say_so() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, nan, 2.0], [1.0, inf, 2.0], [-inf, -inf, -inf], [-inf, -3.0, -inf], [nan, nan, nan], [1.0, 2.0, -inf]]
    logits = torch.tensor(rows)
    for chosen in (greedy_tokens(logits), draw_tokens_reference(logits, torch.arange(6), torch.arange(6))):
        assert chosen.has_failed_R.tolist() == [True, True, True, False, True, False]
        assert chosen.token_ids_R.tolist()[3::2] == [1, 1]
        assert all(0 <= token < 3 for token in chosen.token_ids_R.tolist())
