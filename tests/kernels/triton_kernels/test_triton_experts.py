"""Grouped products of experts in Triton against plain torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from penstock.kernels.activation import ClampedSwiglu, GatedActivation, gelu_tanh_and_mul, silu_and_mul
from penstock.kernels.experts import ExpertWeights, GroupedExperts, mixture_reference
from penstock.kernels.triton.experts import ExpertTiles
from penstock.layers.experts import MoE, Routing
from penstock.parallel import ParallelState
from support.triton_device import DEVICE, needs_triton
from support.triton_interpreter import products_by_row

pytestmark = needs_triton
NUM_EXPERTS, TOP_K = 6, 2


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype).to(DEVICE)


def _experts(dtype: torch.dtype, *, hidden_size: int = 40, size: int = 24, has_bias: bool = False) -> ExpertWeights:
    def each(*shape: int) -> list[Tensor]:
        return [_random(*shape, dtype=dtype, seed=expert) for expert in range(NUM_EXPERTS)]

    biases = (each(2 * size), each(hidden_size)) if has_bias else (None, None)
    return ExpertWeights(each(2 * size, hidden_size), each(hidden_size, size), *biases)


def _chosen(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Experts of each token, ascending, and their weights; no token takes expert 2."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    scores[:, 2] = 0.0
    weights, experts = scores.topk(TOP_K)
    return experts.sort(-1).values.to(DEVICE), weights.to(DEVICE)


@pytest.mark.parametrize(
    ("activation", "has_bias"),
    [(silu_and_mul, False), (gelu_tanh_and_mul, False), (ClampedSwiglu(1.702, 0.7), True)],
    ids=["silu", "gelu_tanh", "clamped_swiglu"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_mixtures_equal_the_specification(
    num_tokens: int, dtype: torch.dtype, activation: GatedActivation, has_bias: bool
) -> None:
    experts, hidden_TD = _experts(dtype, has_bias=has_bias), _random(num_tokens, 40, dtype=dtype) * 6
    chosen = _chosen(num_tokens)
    found = GroupedExperts(experts, activation, is_invariant=False).mixture(hidden_TD, *chosen)
    expected = mixture_reference(hidden_TD, *chosen, experts, activation)
    assert found.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_token_has_the_same_bits_alone_and_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)
    grouped = GroupedExperts(_experts(torch.bfloat16), silu_and_mul, is_invariant=True)
    hidden_TD, (experts_TK, weights_TK) = _random(140, 40, dtype=torch.bfloat16), _chosen(140)
    whole = grouped.mixture(hidden_TD, experts_TK, weights_TK)
    for part in (slice(0, 1), slice(139, 140), slice(30, 50)):
        assert torch.equal(grouped.mixture(hidden_TD[part], experts_TK[part], weights_TK[part]), whole[part])


def test_tiles_cover_each_experts_rows() -> None:
    """Expert 0 has five rows, in two tiles of four; expert 1 has none; expert 2 has three rows."""
    experts_TK = torch.tensor([[0, 2], [0, 2], [0, 2], [0, 0]], device=DEVICE)
    tiles = ExpertTiles.of(experts_TK, 3, 4)
    assert tiles.order_N.tolist() == [0, 2, 4, 6, 7, 1, 3, 5]
    assert tiles.starts_E1.tolist() == [0, 5, 5, 8]
    assert tiles.tiles_E1.tolist() == [0, 2, 2, 3]
    assert tiles.num_tiles >= 3


def test_a_layer_takes_them_and_notices_new_weights() -> None:
    layer = MoE(40, 24, Routing(NUM_EXPERTS, TOP_K), activation="silu", parallel=ParallelState())
    chosen, hidden_TD = _chosen(9), _random(9, 40)
    layer.to(DEVICE)
    for scale in (1.0, 2.0):
        for parameter in layer.experts.parameters():
            parameter.data = _random(*parameter.shape) * scale
        found = layer.experts.partial(hidden_TD, *chosen)
        mlps = list(layer.experts)
        weights = ExpertWeights([m.gate_up_proj.weight for m in mlps], [m.down_proj.weight for m in mlps])
        torch.testing.assert_close(found, mixture_reference(hidden_TD, *chosen, weights, silu_and_mul))
    assert layer.experts._grouped is not None


_COMPILED = """
import sys
sys.path[:0] = {paths!r}
import pytest, torch
from support.triton_compile import LEAST_SHARED, compile_only
from penstock.kernels.experts import ExpertWeights
from penstock.kernels.triton.experts import ExpertTable, mixture
counts = compile_only(pytest.MonkeyPatch(), most_shared=LEAST_SHARED)
for dtype in (torch.bfloat16, torch.float32):
    experts = ExpertWeights([torch.empty(256, 64, dtype=dtype)] * 4, [torch.empty(64, 128, dtype=dtype)] * 4)
    table = ExpertTable(experts)
    for num_tokens in (1, 5, 1024):
        chosen = torch.zeros(num_tokens, 2, dtype=torch.int64)
        mixture(torch.empty(num_tokens, 64, dtype=dtype), chosen, chosen.float(), table, ("silu", 0.0, 0.0))
print(counts)
"""


def test_the_kernels_compile_for_any_gpu() -> None:
    """In a process without the interpreter; no GPU is needed. One compilation per tiling: rows of 16 and of many."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout) == {"_gate_up_kernel": 4, "_down_kernel": 4, "_sum_kernel": 2}
