"""Recurrent layers in Triton against a loop over each request's tokens, in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels import recurrence
from penstock.kernels.recurrence import GateName
from support.recurrences import (
    CHANNELS,
    CHUNKS,
    CONVOLUTIONS,
    DRAFTS,
    LENGTHS,
    NUM_GATES,
    RULES,
    WHOLE,
    Plan,
    Sizes,
    brute_force_convolution,
    brute_force_scan,
    check_gated_norm,
    convolution_parameters,
    random_rows,
    run_convolution,
    run_scan,
)
from support.triton_device import DEVICE, needs_triton

SIZES = Sizes(heads=2, groups=1, key=5, value=3)
PLANS: list[tuple[Plan, dict[str, Any]]] = [
    (CHUNKS, {"max_drafts": 0}),
    (DRAFTS, {"num_padding": 1, "from_snapshots": True}),
]
pytestmark = [needs_triton, pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter takes tensors on the CPU")]


@pytest.fixture(autouse=True)
def without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "NATIVE", None)


@pytest.mark.parametrize("name", RULES)
def test_scan_is_the_loop_over_tokens_with_the_same_bits_in_chunks(name: str) -> None:
    whole = run_scan(name, WHOLE, sizes=SIZES)
    for found, rows_TX in zip(whole, random_rows(SIZES.mixed + NUM_GATES), strict=True):
        torch.testing.assert_close(found.double(), brute_force_scan(rows_TX, name, SIZES), atol=1e-4, rtol=1e-4)
    for plan, options in PLANS:
        assert all(map(torch.equal, run_scan(name, plan, sizes=SIZES, **options), whole))


def test_a_bfloat16_state_is_rounded_after_every_token() -> None:
    whole = run_scan("state space", WHOLE, torch.bfloat16, SIZES)
    wide = run_scan("state space", WHOLE, sizes=SIZES)
    assert not torch.equal(whole[0], wide[0])
    torch.testing.assert_close(whole[0], wide[0], atol=0.1, rtol=0.1)
    for plan, options in PLANS:
        assert all(map(torch.equal, run_scan("state space", plan, torch.bfloat16, SIZES, **options), whole))


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolution_is_the_loop_over_tokens_with_the_same_bits_in_chunks(name: str, dtype: torch.dtype) -> None:
    parameters, rows = convolution_parameters(has_bias=name == "mixed"), random_rows(3 * CHANNELS, LENGTHS)
    whole = run_convolution(name, parameters, WHOLE, rows, dtype)
    for found, rows_TW in zip(whole, rows, strict=True):
        expected = brute_force_convolution(rows_TW, *parameters, CONVOLUTIONS[name])
        atol = 1e-5 if dtype is torch.float32 else 0.2
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=1e-4)
    for plan, options in PLANS:
        assert all(map(torch.equal, run_convolution(name, parameters, plan, rows, dtype, **options), whole))


@pytest.mark.parametrize("gates_first", [True, False])
@pytest.mark.parametrize(("activation", "group_size"), [("silu", 20), ("sigmoid", 60)])
def test_gated_norm_is_that_of_numpy(gates_first: bool, activation: GateName, group_size: int) -> None:
    check_gated_norm(gates_first=gates_first, activation=activation, group_size=group_size)


_COMPILED = """
import sys
import pytest, torch
sys.path[:0] = {paths!r}
from penstock.kernels import recurrence
from support.recurrences import CONVOLUTIONS, LENGTHS, RULES, WHOLE, Sizes, convolution_parameters
from support.recurrences import random_rows, run_convolution, run_scan
from support.triton_compile import compile_only
counts = compile_only(pytest.MonkeyPatch())
recurrence.NATIVE = None
recurrence.triton_runs = lambda x: True
torch.empty = torch.zeros  # outputs that no kernel writes are read
for name in RULES:
    for dtype in (torch.float32, torch.bfloat16):
        run_scan(name, WHOLE[:1], dtype, Sizes(heads=2, groups=1, key=128, value=128), num_pages=64)
for name in CONVOLUTIONS:
    run_convolution(name, convolution_parameters(has_bias=True), WHOLE[:1], random_rows(210, LENGTHS))
for activation in ("silu", "sigmoid"):
    y, weight = torch.empty(2, 512, dtype=torch.bfloat16), torch.empty(128, dtype=torch.bfloat16)
    rule = recurrence.GateRule(group_size=128, gates_first=True, activation=activation)
    recurrence.gated_norm(y, y, weight, 1e-5, rule)
print(sum(counts.values()))
"""


def test_the_kernels_compile_for_an_h100() -> None:
    """In a process without the interpreter; no GPU is needed."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) == 18
