"""Grouped products of experts in Triton against plain torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from penstock.attention import NO_CONTEXT
from penstock.config import LoadConfig, ModelConfig
from penstock.kernels.activation import ClampedSwiglu, GatedActivation, gelu_tanh_and_mul, silu_and_mul
from penstock.kernels.experts import GroupedExperts, mixture_reference
from penstock.kernels.gpu_quantized import GpuQuantizedProducts
from penstock.kernels.stored_weight import ExpertWeights
from penstock.kernels.triton.experts import ExpertTiles
from penstock.layers.experts import ExpertRows, MoE, Routing, note_changes
from penstock.layers.linear import LinearLayer, process_weights_after_loading, restore_weights
from penstock.layers.quantization.method import QuantizedMethod
from penstock.loader.quantized.choose import choose_rounding
from penstock.parallel import ParallelState
from support.mxfp4_checkpoints import write_mxfp4
from support.plain_attention import sequence_logits
from support.stored_weights import NAMES, quantized_as_on_gpu, random_stored
from support.transformers_models import load
from support.triton_device import DEVICE, needs_triton
from support.triton_interpreter import products_by_row

pytestmark = needs_triton
NUM_EXPERTS, TOP_K = 6, 2


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype).to(DEVICE)


def _experts(
    dtype: torch.dtype, *, hidden_size: int = 40, size: int = 24, has_bias: bool = False, form: str = "plain"
) -> tuple[ExpertWeights, list[Any]]:
    """Weights of all experts, and the same dequantised, with their biases: arguments of `mixture_reference`."""

    def each(*shape: int) -> list[Tensor]:
        return [_random(*shape, dtype=dtype, seed=expert) for expert in range(NUM_EXPERTS)]

    pairs = [[random_stored(form, one) for one in each(*of)] for of in ((2 * size, hidden_size), (hidden_size, size))]
    biases = (each(2 * size), each(hidden_size)) if has_bias else (None, None)
    stored, floats = ([[pair[place] for pair in of] for of in pairs] for place in (0, 1))
    return ExpertWeights(*stored, *biases), [*floats, biases]


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
    hidden_TD = _random(num_tokens, 40, dtype=dtype) * 6
    _assert_equals_the_specification(hidden_TD, activation, *_experts(dtype, has_bias=has_bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 70])
@pytest.mark.parametrize("form", NAMES[1:])
def test_mixtures_of_quantised_weights_equal_the_specification(form: str, num_tokens: int, dtype: torch.dtype) -> None:
    """The specification has the dequantised weights. Groups of inputs end within a tile, a row, and a row of tiles."""
    hidden_TD = _random(num_tokens, 160, dtype=dtype) * 6
    _assert_equals_the_specification(hidden_TD, silu_and_mul, *_experts(dtype, hidden_size=160, size=72, form=form))


def _assert_equals_the_specification(
    hidden_TD: Tensor, activation: GatedActivation, experts: ExpertWeights, floats: list[Any]
) -> None:
    chosen = _chosen(len(hidden_TD))
    found = GroupedExperts(experts, activation, is_invariant=False).mixture(hidden_TD, *chosen)
    gate_up, down, biases = floats
    expected = mixture_reference(hidden_TD, *chosen, gate_up, down, activation, *biases)
    assert found.dtype is hidden_TD.dtype
    tolerance = 1e-5 if found.dtype is torch.float32 else 2e-2
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("form", ["plain", "int4 groups of 32", "mxfp4", "float8 blocks"])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)
    experts, _ = _experts(torch.bfloat16, form=form)
    grouped = GroupedExperts(experts, silu_and_mul, is_invariant=True)
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
        # As the runner does after calls that may change the model.
        note_changes(layer)
        found = layer.experts.partial(hidden_TD, *chosen, NO_CONTEXT)
        mlps = list(layer.experts)
        weights = [m.gate_up_proj.weight for m in mlps], [m.down_proj.weight for m in mlps]
        torch.testing.assert_close(found, mixture_reference(hidden_TD, *chosen, *weights, silu_and_mul))
    assert layer.experts._grouped is not None
    layer.experts.are_grouped = False
    torch.testing.assert_close(layer.experts.partial(hidden_TD, *chosen, NO_CONTEXT), found)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_of_quantised_experts_takes_them_and_reads_nothing_on_the_host(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are packed anew are found again, and others are multiplied expert by expert."""
    layer = MoE(64, 32, Routing(NUM_EXPERTS, TOP_K), activation="silu", parallel=ParallelState())
    layer.to(DEVICE)
    chosen, hidden_TD = _chosen(9), _random(9, 64)
    monkeypatch.setattr(ExpertRows, "of", classmethod(lambda *_: pytest.fail("rows were counted on the host")))
    quantize = partial(quantized_as_on_gpu, bits=bits)
    for scale in (1.0, 2.0):
        restore_weights(layer.experts)
        for parameter in layer.experts.parameters():
            parameter.data = _random(*parameter.shape) * scale
        process_weights_after_loading(layer.experts, lambda _: QuantizedMethod(quantize, GpuQuantizedProducts()))
        found = layer.experts.partial(hidden_TD, *chosen, NO_CONTEXT)
        layers = [(mlp.gate_up_proj, mlp.down_proj) for mlp in layer.experts]
        gate_up, down = zip(*(map(_dequantised, pair) for pair in layers), strict=True)
        torch.testing.assert_close(found, mixture_reference(hidden_TD, *chosen, gate_up, down, silu_and_mul))
    mlp = layer.experts[0]
    mlp.down_proj.method.stored_weight = lambda _: None
    mlp.gate_up_proj.method.restore_weights(mlp.gate_up_proj)
    mlp.gate_up_proj.method.process_weights_after_loading(mlp.gate_up_proj)
    with pytest.raises(pytest.fail.Exception, match="rows were counted"):
        layer.experts.partial(hidden_TD, *chosen, NO_CONTEXT)


@pytest.mark.skipif(DEVICE != "cpu", reason="loads on the CPU, in place of a GPU")
def test_an_mxfp4_model_has_the_logits_of_its_floats_in_grouped_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, floats = write_mxfp4(tmp_path)
    (expected,) = sequence_logits(load(floats), [[3, 1, 4, 1, 5]])

    def on_gpu(model_config: ModelConfig, load_config: LoadConfig, kind: str) -> Any:
        return choose_rounding(model_config, load_config, "cuda")

    monkeypatch.setattr("penstock.layers.quantization.method.PRODUCTS", GpuQuantizedProducts())
    monkeypatch.setattr("penstock.loader.loader.choose_rounding", on_gpu)
    monkeypatch.setattr("penstock.layers.experts.NATIVE", None)
    model = load(stored)
    (found,) = sequence_logits(model, [[3, 1, 4, 1, 5]])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    assert mixtures
    assert all(mixture.experts._grouped is not None for mixture in mixtures)


def _dequantised(layer: LinearLayer) -> Tensor:
    method = layer.method
    assert isinstance(method, QuantizedMethod)
    assert method.packed_OI is not None
    return method.unpack(method.packed_OI, layer.output_size)


_COMPILED = """
import sys
sys.path[:0] = {paths!r}
import pytest, torch
from support.triton_compile import LEAST_SHARED, compile_only
from support.stored_weights import NAMES, empty_weight
from penstock.kernels.stored_weight import ExpertWeights
from penstock.kernels.triton.experts import ExpertTable, mixture
counts = compile_only(pytest.MonkeyPatch(), most_shared=LEAST_SHARED)
for name in NAMES:
    table = ExpertTable(ExpertWeights([empty_weight(name, 1024, 512)] * 4, [empty_weight(name, 512, 512)] * 4))
    for num_tokens in (1, 48, 1024) if name == "plain" else (1024,):
        chosen = torch.zeros(num_tokens, 2, dtype=torch.int64)
        hidden = torch.empty(num_tokens, 512, dtype=torch.bfloat16)
        mixture(hidden, chosen, chosen.float(), table, ("silu", 0.0, 0.0))
print(counts)
"""


def test_the_kernels_compile_for_any_gpu() -> None:
    """In a process without the interpreter; no GPU is needed."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout).keys() == {"_grouped_kernel", "_sum_kernel"}
