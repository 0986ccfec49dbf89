"""GPTQ against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT
from penstock.errors import ModelError
from penstock.kernels.quantized import INT4_LEVELS
from penstock.layers.parallel_linear import ColumnParallelLinear
from penstock.layers.quantization import gptq
from penstock.layers.quantization.gptq import gptq_quantize
from penstock.layers.quantization.observe import accumulate_grams
from penstock.layers.quantization.quantize import quantize_int4
from penstock.parallel import ParallelState


def correlated_inputs(rows: int, inputs: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    mixed_TI = torch.randn(rows, 8, generator=random) @ torch.randn(8, inputs, generator=random)
    return mixed_TI + 0.3 * torch.randn(rows, inputs, generator=random)


def by_definition(weight_OI: Tensor, gram_II: Tensor, group_size: int) -> Tensor:
    """Quantise the remaining input feature with the largest inputs, and solve for the best weights of the others."""
    grid = quantize_int4(weight_OI, group_size)
    assert grid.minimums_OG is not None
    weight_OI, gram_II = weight_OI.double().clone(), gram_II.double().clone()
    gram_II += 0.01 * gram_II.diagonal().mean() * torch.eye(len(gram_II))
    order = torch.argsort(gram_II.diagonal(), descending=True, stable=True).tolist()
    values = torch.empty(weight_OI.shape, dtype=torch.float64)
    for place, i in enumerate(order):
        scale_O, minimum_O = (
            per_group[:, i // group_size].double() for per_group in (grid.scales_OG, grid.minimums_OG)
        )
        value_O = ((weight_OI[:, i] - minimum_O) / scale_O).round().clamp(0, INT4_LEVELS - 1)
        change_O = value_O * scale_O + minimum_O - weight_OI[:, i]
        # Least squares: what the rest must change by, given the change of this one.
        rest = order[place + 1 :]
        if rest:
            best_I = torch.linalg.solve(gram_II[rest][:, rest], gram_II[rest, i])
            weight_OI[:, rest] -= change_O[:, None] * best_I
        values[:, i] = value_O
    return values


@pytest.mark.parametrize(("inputs", "group_size"), [(40, 40), (96, 32), (150, 64), (300, 128)])
def test_integers_are_those_of_the_definition(inputs: int, group_size: int) -> None:
    weight_OI = torch.randn(20, inputs, generator=torch.Generator().manual_seed(inputs))
    x_TI = correlated_inputs(500, inputs)
    gram_II = x_TI.T @ x_TI
    rounded = gptq_quantize(weight_OI, gram_II, group_size)
    expected_OI = by_definition(weight_OI, gram_II, group_size)
    # A weight in the middle of two integers may fall to either side, and the next ones then differ.
    same_O = (rounded.values_OI == expected_OI).all(dim=1)
    assert same_O.float().mean() >= 0.8


@pytest.mark.parametrize("inputs", [64, 300])
def test_results_are_closer_than_those_of_the_nearest_integers(inputs: int) -> None:
    weight_OI, x_TI = torch.randn(50, inputs), correlated_inputs(1000, inputs)
    nearest, rounded = quantize_int4(weight_OI), gptq_quantize(weight_OI, x_TI.T @ x_TI)
    exact_TO = x_TI @ weight_OI.T
    errors = [(x_TI @ weight.dequantize().T - exact_TO).norm() for weight in (nearest, rounded)]
    assert errors[1] < 0.7 * errors[0]
    assert torch.equal(rounded.scales_OG, nearest.scales_OG)
    assert rounded.minimums_OG is not None
    assert nearest.minimums_OG is not None
    assert torch.equal(rounded.minimums_OG, nearest.minimums_OG)


def test_inputs_that_were_never_seen_are_rounded_to_the_nearest() -> None:
    weight_OI = torch.randn(30, 200)
    weight_OI[:, 40:60] = 0
    nearest = quantize_int4(weight_OI)
    assert torch.equal(gptq_quantize(weight_OI, torch.zeros(200, 200)).values_OI, nearest.values_OI)
    gram_II = torch.zeros(200, 200)
    x_TI = correlated_inputs(400, 100)
    gram_II[:100, :100] = x_TI.T @ x_TI
    assert torch.equal(gptq_quantize(weight_OI, gram_II).values_OI[:, 100:], nearest.values_OI[:, 100:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    gram_II = torch.eye(64)
    gram_II[3, 3] = value
    with pytest.raises(ModelError, match="not finite"):
        gptq_quantize(torch.randn(4, 64), gram_II)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_multiply_as_before_while_their_grams_accumulate(dtype: torch.dtype) -> None:
    layer = ColumnParallelLinear(48, 20, bias=True, parallel=ParallelState())
    for parameter in layer.parameters():
        parameter.data.normal_()
    layer.to(dtype).requires_grad_(False)
    method, parts = layer.method, [torch.randn(1, 7, 48, dtype=dtype), torch.randn(5, 48, dtype=dtype)]
    expected = [layer(part, NO_CONTEXT) for part in parts]
    with accumulate_grams([layer]) as (gram,):
        assert all(torch.equal(layer(part, NO_CONTEXT), result) for part, result in zip(parts, expected, strict=True))
    assert layer.method is method
    x_TI = torch.cat([part.view(-1, 48).float() for part in parts])
    assert gram.num_rows == len(x_TI)
    assert torch.allclose(gram.values, x_TI.T @ x_TI, rtol=1e-5, atol=1e-4)


def test_outputs_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI, x_TI = torch.randn(50, 200), torch.randn(400, 200)
    together = gptq_quantize(weight_OI, x_TI.T @ x_TI)
    monkeypatch.setattr(gptq, "_WEIGHTS_AT_ONCE", 200 * 7)
    in_parts = gptq_quantize(weight_OI, x_TI.T @ x_TI)
    assert in_parts.shape == together.shape
    assert torch.equal(in_parts.scales_OG, together.scales_OG)
    # Sums of other shapes may be rounded in another way, and a weight then goes to the other side.
    assert (in_parts.values_OI != together.values_OI).float().mean() < 0.01
