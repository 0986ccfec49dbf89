"""Convolutions and recurrences over pages of states: those of a loop over each request's tokens, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.kernels import recurrence
from penstock.kernels.native import load_native_kernels
from penstock.kernels.recurrence import (
    GateName,
    GroupOfRanks,
    ScanParameters,
    ScanRule,
    group_squares,
    scan,
    shared_group_norm,
)
from support.instruction_sets import AVAILABLE
from support.recurrences import (
    CHANNELS,
    CONVOLUTIONS,
    LARGE,
    NUM_GATES,
    PLANS,
    RULES,
    SMALL,
    WHOLE,
    Plan,
    brute_force_convolution,
    brute_force_scan,
    check_gated_norm,
    convolution_parameters,
    parameters_of,
    random_plan,
    random_rows,
    rule_of,
    run_convolution,
    run_scan,
    state_step,
)

LONG = 150, 70, 3
WHOLE_LONG: Plan = [[(request, length, 0)] for request, length in enumerate(LONG)]


@pytest.fixture(params=["torch", *AVAILABLE])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch specification, or the C++ kernels of an instruction set."""
    monkeypatch.setattr(recurrence, "NATIVE", load_native_kernels(request.param))


@pytest.fixture(params=AVAILABLE)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "NATIVE", load_native_kernels(request.param))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.usefixtures("implementation")
def test_scan_is_the_loop_over_tokens(name: str) -> None:
    for found, rows_TX in zip(run_scan(name, WHOLE), random_rows(SMALL.mixed + NUM_GATES), strict=True):
        torch.testing.assert_close(found.double(), brute_force_scan(rows_TX, name, SMALL), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("implementation")
def test_scan_has_the_same_bits_in_chunks_and_with_drafts(name: str, dtype: torch.dtype) -> None:
    whole = run_scan(name, WHOLE, dtype)
    for plan, options in PLANS:
        assert all(map(torch.equal, run_scan(name, plan, dtype, **options), whole))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("native")
def test_kernels_of_whole_vectors_are_the_loop_and_have_the_same_bits_in_any_chunks(
    name: str, dtype: torch.dtype
) -> None:
    rows = random_rows(LARGE.mixed + NUM_GATES, LONG)
    options: dict[str, Any] = {"sizes": LARGE, "rows": rows, "num_pages": 150}
    whole = run_scan(name, WHOLE_LONG, dtype, **options, max_drafts=0, blocks_without_snapshot=2)
    if dtype is torch.float32:
        for found, rows_TX in zip(whole, rows, strict=True):
            torch.testing.assert_close(found.double(), brute_force_scan(rows_TX, name, LARGE), atol=1e-3, rtol=1e-3)
    before = torch.get_num_threads()
    for seed, num_threads in enumerate((1, 2, 3)):
        torch.set_num_threads(num_threads)
        found = run_scan(name, random_plan(LONG, 2, seed), dtype, **options, from_snapshots=seed == 2)
        assert all(map(torch.equal, found, whole))
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.usefixtures("implementation")
def test_convolution_is_the_loop_over_tokens_with_the_same_bits_in_chunks(name: str, has_bias: bool) -> None:
    parameters, rows = convolution_parameters(has_bias=has_bias), random_rows(3 * CHANNELS, LONG)
    whole = run_convolution(name, parameters, WHOLE_LONG, rows)
    narrow = run_convolution(name, parameters, WHOLE_LONG, rows, torch.bfloat16)
    assert not torch.equal(narrow[0], whole[0])
    for found, rows_TW in zip(whole, rows, strict=True):
        expected = brute_force_convolution(rows_TW, *parameters, CONVOLUTIONS[name])
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
    for seed, more in enumerate([{}, {"num_padding": 2}, {"from_snapshots": True, "blocks_without_snapshot": 2}]):
        plan = random_plan(LONG, 2, seed)
        assert all(map(torch.equal, run_convolution(name, parameters, plan, rows, **more), whole))
        assert all(map(torch.equal, run_convolution(name, parameters, plan, rows, torch.bfloat16, **more), narrow))


@pytest.mark.parametrize("gates_first", [True, False])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("group_size", [3, 20, 60])
@pytest.mark.usefixtures("implementation")
def test_gated_norm_is_that_of_numpy(gates_first: bool, activation: GateName, group_size: int) -> None:
    check_gated_norm(gates_first=gates_first, activation=activation, group_size=group_size)


@pytest.mark.usefixtures("implementation")
def test_a_group_of_two_ranks_has_the_norm_of_all_its_channels() -> None:
    x_TX, weight_X = torch.randn(3, 48), torch.randn(48)
    # Two groups of two ranks each.
    ranks = [GroupOfRanks(size=12, number=rank // 2, num_groups=2, group_size=24) for rank in range(4)]
    parts = [x_TX[:, 12 * rank :][:, :12].contiguous() for rank in range(4)]
    squares_TG = sum((group_squares(part, group) for part, group in zip(parts, ranks, strict=True)), torch.zeros(3, 2))
    found = [
        shared_group_norm(part, squares_TG, weight_X[12 * rank :][:12].contiguous(), 1e-5, ranks[rank])
        for rank, part in enumerate(parts)
    ]
    groups_TGX = x_TX.double().view(3, 2, 24)
    expected = groups_TGX / (groups_TGX.square().mean(2, keepdim=True) + 1e-5).sqrt() * weight_X.double().view(2, 24)
    torch.testing.assert_close(torch.cat(found, 1).double(), expected.flatten(1), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("implementation")
def test_a_bfloat16_state_costs_a_rounding_per_token() -> None:
    wide, narrow = run_scan("state space", WHOLE), run_scan("state space", WHOLE, torch.bfloat16)
    assert not torch.equal(wide[0], narrow[0])
    torch.testing.assert_close(wide[0], narrow[0], atol=0.1, rtol=0.1)


@pytest.mark.usefixtures("implementation")
def test_rows_of_bfloat16_are_computed_in_float32() -> None:
    rule, parameters = rule_of("constant decay", SMALL), ScanParameters(torch.zeros(SMALL.heads))
    pages = torch.zeros(2, SMALL.heads, SMALL.key, SMALL.value)
    starts, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    step = state_step(torch.ones(1, 2, dtype=torch.int32), starts, lengths, torch.arange(2), 1, 1, 2)
    mixed_TC = torch.randn(2, SMALL.mixed, dtype=torch.bfloat16)
    found = scan(mixed_TC, mixed_TC, pages, step, rule, parameters)
    wide = scan(mixed_TC.float(), mixed_TC.float(), torch.zeros_like(pages), step, rule, parameters)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, wide.bfloat16(), atol=1e-5, rtol=1e-2)


@pytest.mark.usefixtures("implementation")
def test_a_step_of_padding_alone_makes_zeros() -> None:
    rule, parameters = rule_of("state space", SMALL), parameters_of("state space", SMALL)
    pages = torch.zeros(2, SMALL.heads, SMALL.key, SMALL.value)
    starts, lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    step = state_step(torch.zeros(1, 2, dtype=torch.int32), starts, lengths, torch.full((3,), -1), 1, 0, 0)
    found = scan(torch.zeros(3, SMALL.mixed), torch.zeros(3, NUM_GATES), pages, step, rule, parameters)
    assert not found.any()


@pytest.mark.parametrize("options", [{"betas": 0, "step_size": "value"}, {"scales_values": True, "step_size": "key"}])
def test_steps_of_another_size_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="per head or"):
        ScanRule(num_groups=1, values=0, keys=1, queries=2, **options)
