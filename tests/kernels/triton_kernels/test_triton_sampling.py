"""Argmax, draws and log-probabilities in Triton against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.triton_device import DEVICE, needs_triton

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.attention import NO_CONTEXT
from penstock.kernels import sampling as specification
from penstock.kernels.random import token_bits
from penstock.kernels.triton import sampling
from penstock.kernels.triton.sampling import first_token_of, random_bits
from penstock.layers.embedding import LMHead
from penstock.parallel import ParallelState

pytestmark = needs_triton

NAN, INF = float("nan"), float("inf")


def _logits(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return (3 * torch.randn(num_rows, size, generator=generator)).to(dtype).to(DEVICE)


def _int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@triton.jit
def _store_bits(bits_ptr, seed_ptr, position_ptr, first_counter, COUNTERS: tl.constexpr):
    lane = tl.arange(0, COUNTERS)
    counter = first_counter + lane
    word_0, word_1, word_2, word_3 = random_bits(tl.load(seed_ptr), tl.load(position_ptr), counter)
    place = first_token_of(lane)
    tl.store(bits_ptr + place, word_0.to(tl.int64))
    tl.store(bits_ptr + place + 16, word_1.to(tl.int64))
    tl.store(bits_ptr + place + 32, word_2.to(tl.int64))
    tl.store(bits_ptr + place + 48, word_3.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 17, -1, 0x5851F42D4C957F2D, -(1 << 63)])
@pytest.mark.parametrize("position", [0, 1, 131_071, (1 << 32) + 5])
@pytest.mark.parametrize("first_token", [0, 128, 262_144 - 256])
def test_random_bits_are_those_of_the_specification(seed: int, position: int, first_token: int) -> None:
    bits = torch.empty(256, dtype=torch.int64, device=DEVICE)

    _store_bits[(1,)](bits, _int64(seed), _int64(position), first_token // 4, COUNTERS=64)

    assert torch.equal(bits, token_bits(_int64(seed), _int64(position), first_token, 256)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 7), (2, 2048), (1, 5000), (20, 100)])
def test_argmax(dtype: torch.dtype, num_rows: int, size: int) -> None:
    logits_RV = _logits(num_rows, size, dtype)

    token_ids_R, has_failed_R, largest_R = sampling.argmax(logits_RV)

    # The first of ties, which bfloat16 has.
    is_largest_RV = logits_RV == logits_RV.amax(-1, keepdim=True)
    assert torch.equal(token_ids_R, is_largest_RV.to(torch.int8).argmax(-1))
    assert torch.equal(largest_R, logits_RV.float().amax(-1))
    assert not has_failed_R.any()


def test_argmax_takes_the_first_of_ties_across_blocks_and_parts() -> None:
    logits_RV = torch.zeros(2, 9000, device=DEVICE)
    logits_RV[0, [8999, 4100, 2047]] = 1.0
    logits_RV[1] = -1.0
    logits_RV[1, [8000]] = 0.0
    logits_RV[1, [70]] = -0.0

    assert sampling.argmax(logits_RV)[0].tolist() == [2047, 70]


def test_rows_that_cannot_be_chosen_from_fail() -> None:
    rows = [[1.0, NAN, 2.0], [1.0, INF, 2.0], [-INF, -INF, -INF], [-INF, -3.0, -INF], [NAN, INF, NAN], [1.0, 2.0, -INF]]
    logits_RV = torch.tensor(rows, device=DEVICE)
    numbers_R = torch.arange(6, device=DEVICE)

    token_ids_R, has_failed_R, largest_R = sampling.argmax(logits_RV)

    expected = specification.greedy_tokens_reference(logits_RV)
    assert torch.equal(token_ids_R, expected.token_ids_R)
    assert torch.equal(has_failed_R, expected.has_failed_R)
    torch.testing.assert_close(largest_R, logits_RV.amax(-1), rtol=0, atol=0, equal_nan=True)

    token_ids_R, has_failed_R = sampling.draw(logits_RV, numbers_R, numbers_R, numbers_R)

    assert torch.equal(has_failed_R, expected.has_failed_R)
    assert token_ids_R.tolist()[3::2] == [1, 1]
    assert ((token_ids_R >= 0) & (token_ids_R < 3)).all()


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (5, 63), (4, 1025), (1, 6000), (20, 100)])
def test_draws_are_those_of_the_specification(num_rows: int, size: int) -> None:
    logits_RV = _logits(num_rows, size)
    logits_RV[:, size // 2 + 1 :] -= INF
    seed_S = torch.randint(-(1 << 62), 1 << 62, (num_rows + 3,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    slots_R = torch.arange(num_rows - 1, -1, -1, device=DEVICE) + 2
    positions_R = 7 * torch.arange(num_rows, device=DEVICE)

    token_ids_R, has_failed_R = sampling.draw(logits_RV, seed_S, slots_R, positions_R)

    expected = specification.draw_tokens_reference(logits_RV, seed_S[slots_R], positions_R)
    assert torch.equal(token_ids_R, expected.token_ids_R)
    assert not has_failed_R.any()


@pytest.mark.parametrize("num_programs", [1, 9, 1024])
def test_results_do_not_depend_on_the_number_of_parts(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV, numbers_R = _logits(3, 9000), torch.arange(3, device=DEVICE)
    monkeypatch.setattr(sampling, "_NUM_PROGRAMS", num_programs)

    drawn_R, _ = sampling.draw(logits_RV, numbers_R, numbers_R, numbers_R)

    assert torch.equal(sampling.argmax(logits_RV)[0], logits_RV.argmax(-1))
    assert torch.equal(drawn_R, specification.draw_tokens_reference(logits_RV, numbers_R, numbers_R).token_ids_R)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size", "num_logprobs"), [(1, 1, 0), (3, 50, 50), (2, 9000, 5), (1, 6000, 5000)])
def test_top_logprobs(dtype: torch.dtype, num_rows: int, size: int, num_logprobs: int) -> None:
    logits_RV = _logits(num_rows, size, dtype)
    logits_RV[:, 1::3] -= INF
    sampled_R = torch.arange(num_rows, device=DEVICE) * 3 % size

    for normalize in (True, False):
        token_ids_RN, logprobs_RN, ranks_R = sampling.top_logprobs(
            logits_RV, sampled_R, num_logprobs, normalize=normalize
        )

        expected_RV = logits_RV.float().log_softmax(-1) if normalize else logits_RV.float()
        assert torch.equal(token_ids_RN[:, 0], sampled_R)
        assert torch.equal(token_ids_RN[:, 1:], logits_RV.topk(num_logprobs).indices)
        torch.testing.assert_close(logprobs_RN, expected_RV.gather(-1, token_ids_RN), rtol=1e-5, atol=1e-5)
        assert torch.equal(ranks_R, (logits_RV >= logits_RV.gather(-1, sampled_R.unsqueeze(-1))).sum(-1))


def test_logprobs_of_extreme_rows() -> None:
    rows = [[-INF, -INF], [-200.0, -INF], [INF, 1.0], [INF, INF], [NAN, 1.0], [1e30, 1e30], [-1e30, -INF]]
    logits_RV = torch.tensor(rows, device=DEVICE).repeat_interleave(2500, dim=1)

    for token in (0, 4999):
        sampled_R = torch.full((len(rows),), token, device=DEVICE)
        _, logprobs_RN, _ = sampling.top_logprobs(logits_RV, sampled_R, 0, normalize=True)

        expected_R = logits_RV[:, token] - logits_RV.logsumexp(-1)
        torch.testing.assert_close(logprobs_RN[:, 0], expected_R, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("spoilt_by", [None, [3, 0, 2, 0, 1, 4]])
def test_failures_are_the_models_or_the_requests(spoilt_by: list[int] | None) -> None:
    rows = [[1.0, -INF], [NAN, 1.0], [1.0, 2.0], [INF, 1.0], [-INF, -INF], [-INF, 0.0]]
    raw_RV = torch.tensor(rows, device=DEVICE).repeat_interleave(2500, dim=1)
    has_failed_R = torch.tensor([True, True, False, True, True, True], device=DEVICE)
    spoilt_by_R = None if spoilt_by is None else _int64(*spoilt_by)

    codes_R = specification.failure_codes(has_failed_R, raw_RV, spoilt_by_R)

    assert codes_R.tolist() == ([2, 1, 0, 1, 1, 2] if spoilt_by is None else [5, 1, 0, 1, 1, 6])


def test_rows_of_a_wider_tensor() -> None:
    logits_RV, numbers_R = _logits(4, 300)[::2, 8:200], torch.arange(2, device=DEVICE)

    assert torch.equal(sampling.argmax(logits_RV)[0], logits_RV.argmax(-1))
    drawn_R, _ = sampling.draw(logits_RV, numbers_R, numbers_R, numbers_R)
    assert torch.equal(drawn_R, sampling.draw(logits_RV.contiguous(), numbers_R, numbers_R, numbers_R)[0])


def test_bfloat16_logits_are_chosen_from_by_the_kernels() -> None:
    logits_RV, numbers_R = _logits(2, 100, torch.bfloat16), torch.arange(2, device=DEVICE)

    assert torch.equal(specification.greedy_tokens(logits_RV).token_ids_R, logits_RV.float().argmax(-1))
    largest = specification.largest_logits(logits_RV)
    assert torch.equal(largest.values_R, logits_RV.float().amax(-1))
    drawn = specification.draw_tokens(logits_RV, numbers_R, numbers_R, numbers_R)
    assert torch.equal(drawn.token_ids_R, specification.draw_tokens_reference(logits_RV, numbers_R, numbers_R)[0])
    logprobs = specification.top_logprobs(logits_RV, drawn.token_ids_R, 3)
    expected_RV = logits_RV.float().log_softmax(-1)
    torch.testing.assert_close(logprobs.logprobs_RN, expected_RV.gather(-1, logprobs.token_ids_RN), rtol=0, atol=1e-5)


def test_no_rows() -> None:
    empty_R = torch.empty(0, dtype=torch.int64, device=DEVICE)

    assert sampling.argmax(torch.empty(0, 100, device=DEVICE))[0].shape == (0,)
    assert sampling.draw(torch.empty(0, 100, device=DEVICE), empty_R, empty_R, empty_R)[0].shape == (0,)


def test_the_lm_head_chooses_from_products_in_the_dtype_of_the_model() -> None:
    head = LMHead(300, 64, parallel=ParallelState())
    head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    head = head.to(device=DEVICE, dtype=torch.bfloat16)
    hidden_LD = _logits(5, 64, torch.bfloat16)

    chosen = head.compute_greedy(hidden_LD, NO_CONTEXT)

    assert chosen is not None
    expected = specification.greedy_tokens_reference(head(hidden_LD, NO_CONTEXT))
    assert torch.equal(chosen.token_ids_R, expected.token_ids_R)
    assert not chosen.has_failed_R.any()
