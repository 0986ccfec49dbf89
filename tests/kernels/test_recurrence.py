"""Convolutions and recurrences over pages of states: those of a loop over each request's tokens, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.recurrence import ScanParameters, ScanRule, convolve, gated_norm, scan
from penstock.kernels.recurrent_state import StateStep
from support.recurrences import CHUNKS, DRAFTS, LENGTHS, WHOLE, Plan, run_plan

HEADS, GROUPS, KEY, VALUE = 4, 2, 5, 3
MIXED = HEADS * VALUE + 2 * GROUPS * KEY
NUM_PAGES = 32

RULES = {
    "state space": ScanRule(
        num_groups=GROUPS,
        values=0,
        keys=12,
        queries=22,
        steps=2,
        step_scale=0.8,
        scales_values=True,
        min_step=0.1,
        max_step=1.5,
    ),
    "gated delta": ScanRule(
        num_groups=GROUPS, values=20, keys=10, queries=0, steps=1, betas=5, has_unit_keys=True, query_scale=KEY**-0.5
    ),
    "channel delta": ScanRule(
        num_groups=GROUPS,
        values=0,
        keys=12,
        queries=22,
        steps=4,
        step_size="key",
        betas=0,
        beta_scale=2.0,
        has_unit_keys=True,
    ),
    "selective": ScanRule(
        num_groups=GROUPS, values=0, keys=12, queries=22, steps=0, step_size="value", scales_values=True
    ),
    "constant decay": ScanRule(num_groups=GROUPS, values=0, keys=12, queries=22),
}
STEPS = {"head": HEADS, "key": HEADS * KEY, "value": HEADS * VALUE}


def parameters_of(rule: ScanRule) -> ScanParameters:
    generator = torch.Generator().manual_seed(5)
    if rule.step_size == "value":
        decay_log = torch.randn(HEADS, KEY, VALUE, generator=generator)
        return ScanParameters(decay_log, None, torch.randn(HEADS * VALUE, generator=generator))
    decay_log = torch.randn(HEADS, generator=generator)
    if rule.steps is None:
        return ScanParameters(decay_log)
    bias = torch.randn(STEPS[rule.step_size], generator=generator)
    return ScanParameters(decay_log, bias, torch.randn(HEADS, generator=generator) if rule.scales_values else None)


def random_rows(width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, width, generator=generator) for length in LENGTHS]


def brute_force_scan(rows_TX: Tensor, rule: ScanRule, parameters: ScanParameters) -> Tensor:
    rows = rows_TX.double().numpy()
    decay_log, bias, skip = (None if one is None else one.double().numpy() for one in parameters)
    state = np.zeros((HEADS, KEY, VALUE))
    outputs = []
    for row in rows:
        mixed, gates = row[:MIXED], row[MIXED:]
        out = np.zeros((HEADS, VALUE))
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            key = mixed[rule.keys + group * KEY :][:KEY]
            query = mixed[rule.queries + group * KEY :][:KEY]
            value = mixed[rule.values + head * VALUE :][:VALUE]
            if rule.has_unit_keys:
                key, query = (x / np.sqrt((x * x).sum() + 1e-6) for x in (key, query))
            step: Any = 1.0
            if rule.steps is not None:
                size = STEPS[rule.step_size] // HEADS
                raw = gates[rule.steps + head * size :][:size] * rule.step_scale
                raw = raw + (0 if bias is None else bias[head * size :][:size])
                step = np.clip(np.log1p(np.exp(raw)), rule.min_step, rule.max_step)
                step = step[:, None] if rule.step_size == "key" else step[None, :]
            state[head] *= np.exp(-np.exp(decay_log[head]) * step)
            added = value
            if rule.betas is not None:
                beta = rule.beta_scale / (1 + np.exp(-gates[rule.betas + head]))
                added = beta * (value - key @ state[head])
            elif rule.scales_values:
                added = (step * value).reshape(-1)
            state[head] += np.outer(key, added)
            out[head] = (query * rule.query_scale) @ state[head]
            if skip is not None:
                out[head] += skip.reshape(HEADS, -1)[head] * value
        outputs.append(out.reshape(-1))
    return torch.from_numpy(np.array(outputs))


def run_scan(rule: ScanRule, plan: Plan, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    parameters = parameters_of(rule)
    pages = torch.empty(NUM_PAGES, HEADS, KEY, VALUE, dtype=dtype)

    def compute(rows_TX: Tensor, step: StateStep) -> Tensor:
        mixed_TC, gates_TW = rows_TX[:, :MIXED].contiguous(), rows_TX[:, MIXED:].contiguous()
        return scan(mixed_TC, gates_TW, pages, step, rule, parameters)

    return run_plan(plan, random_rows(MIXED + 30), pages, compute, **options)


@pytest.mark.parametrize("name", RULES)
def test_scan_is_the_loop_over_tokens(name: str) -> None:
    rule = RULES[name]
    for found, rows_TX in zip(run_scan(rule, WHOLE), random_rows(MIXED + 30), strict=True):
        torch.testing.assert_close(
            found.double(), brute_force_scan(rows_TX, rule, parameters_of(rule)), atol=1e-4, rtol=1e-4
        )


PLANS = [
    (CHUNKS, {}),
    (CHUNKS, {"max_drafts": 0}),
    (CHUNKS, {"num_padding": 3}),
    (CHUNKS, {"from_snapshots": True}),
    (DRAFTS, {}),
    (DRAFTS, {"num_padding": 1, "from_snapshots": True}),
]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scan_has_the_same_bits_in_chunks_and_with_drafts(name: str, dtype: torch.dtype) -> None:
    whole = run_scan(RULES[name], WHOLE, dtype)
    for plan, options in PLANS:
        for found, expected in zip(run_scan(RULES[name], plan, dtype, **options), whole, strict=True):
            assert torch.equal(found, expected)


CHANNELS, TAPS = 7, 4
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "mixed": {"offset": 2, "gates": None, "activation": "silu"},
    "gated": {"offset": 14, "gates": (0, 7), "activation": None},
}


def brute_force_convolution(rows_TW: Tensor, weight_KC: Tensor, bias_C: Tensor | None, options: Any) -> Tensor:
    rows = rows_TW.double().numpy()
    inputs = rows[:, options["offset"] :][:, :CHANNELS]
    if options["gates"] is not None:
        inputs = inputs * rows[:, options["gates"][0] :][:, :CHANNELS]
    padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), inputs])
    out = np.array([(padded[t : t + TAPS] * weight_KC.double().numpy()).sum(0) for t in range(len(rows))])
    if bias_C is not None:
        out = out + bias_C.double().numpy()
    if options["activation"] == "silu":
        out = out / (1 + np.exp(-out))
    if options["gates"] is not None:
        out = out * rows[:, options["gates"][1] :][:, :CHANNELS]
    return torch.from_numpy(out)


def run_convolution(
    options: Any,
    weight_KC: Tensor,
    bias_C: Tensor | None,
    plan: Plan,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> list[Tensor]:
    pages = torch.empty(NUM_PAGES, TAPS - 1, CHANNELS, dtype=dtype)

    def compute(rows_TW: Tensor, step: StateStep) -> Tensor:
        return convolve(rows_TW, pages, step, weight_KC, bias_C, **options)

    return run_plan(plan, random_rows(22), pages, compute, **more)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_is_the_loop_over_tokens_with_the_same_bits_in_chunks(name: str) -> None:
    options = CONVOLUTIONS[name]
    weight_KC, bias = torch.randn(TAPS, CHANNELS), torch.randn(CHANNELS)
    for bias_C in (None, bias):
        whole = run_convolution(options, weight_KC, bias_C, WHOLE)
        for found, rows_TW in zip(whole, random_rows(22), strict=True):
            expected = brute_force_convolution(rows_TW, weight_KC, bias_C, options)
            torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        narrow = run_convolution(options, weight_KC, bias_C, WHOLE, torch.bfloat16)
        assert not torch.equal(narrow[0], whole[0])
        for dtype, alone in ((torch.float32, whole), (torch.bfloat16, narrow)):
            for plan, more in PLANS:
                found_in_chunks = run_convolution(options, weight_KC, bias_C, plan, dtype, **more)
                assert all(map(torch.equal, found_in_chunks, alone))


@pytest.mark.parametrize("gates_first", [True, False])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("group_size", [3, 6, 12])
def test_gated_norm_is_that_of_numpy(gates_first: bool, activation: Any, group_size: int) -> None:
    y_TX, gate_TW = torch.randn(5, 12), torch.randn(5, 20)
    y, gate = y_TX.double().numpy(), gate_TW.double().numpy()[:, 4:16]
    gate = gate * 0.7
    factor = 1 / (1 + np.exp(-gate)) * (gate if activation == "silu" else 1)
    options: Any = {
        "offset": 4,
        "group_size": group_size,
        "gates_first": gates_first,
        "activation": activation,
        "gate_scale": 0.7,
    }
    for weight in (torch.randn(12), torch.randn(group_size), None):
        if weight is None:
            expected = y * factor
        else:
            x = (y * factor if gates_first else y).reshape(5, -1, group_size)
            normed = (
                x / np.sqrt((x * x).mean(2, keepdims=True) + 1e-5) * weight.double().numpy().reshape(-1, group_size)
            )
            expected = normed.reshape(5, 12) * (1 if gates_first else factor)
        found = gated_norm(y_TX, gate_TW, weight, 1e-5, **options)
        torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


def test_a_bfloat16_state_costs_a_rounding_per_token() -> None:
    rule = RULES["state space"]
    wide, narrow = run_scan(rule, WHOLE), run_scan(rule, WHOLE, torch.bfloat16)
    assert not torch.equal(wide[0], narrow[0])
    torch.testing.assert_close(wide[0], narrow[0], atol=0.1, rtol=0.1)


def test_rows_of_bfloat16_are_computed_in_float32() -> None:
    rule, parameters = (
        replace(RULES["state space"], steps=None, scales_values=False),
        ScanParameters(torch.zeros(HEADS)),
    )
    pages = torch.zeros(2, HEADS, KEY, VALUE)
    step = StateStep(
        torch.ones(1, 2, dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        torch.arange(2),
        num_own_blocks=1,
        block_size=4,
        max_query_len=2,
    )
    mixed_TC = torch.randn(2, MIXED, dtype=torch.bfloat16)
    found = scan(mixed_TC, mixed_TC, pages, step, rule, parameters)
    wide = scan(mixed_TC.float(), mixed_TC.float(), torch.zeros_like(pages), step, rule, parameters)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wide.bfloat16())
