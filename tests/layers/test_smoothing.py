"""Smoothing keeps a model's function, and makes quantised products closer to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT
from penstock.layers.linear import LinearLayer
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import LayerNorm, RMSNorm, RMSNormRoundedLast
from penstock.layers.quantization.method import choose_method
from penstock.layers.quantization.observe import record_peaks
from penstock.layers.quantization.smoothing import smooth, smoothable, smoothing_scales
from penstock.layers.scalable_inputs import outputs_of
from penstock.parallel import ParallelState

HIDDEN, WIDE = 64, 96


class Block(nn.Module):
    """A norm and an MLP, with weights of trained models' kind: some features of the input are large."""

    def __init__(self, norm: RMSNorm | LayerNorm) -> None:
        super().__init__()
        self.norm = norm
        self.mlp = GatedMLP(HIDDEN, WIDE, bias=True, parallel=ParallelState())
        self.mlp.gate_up_proj.scalable_inputs = outputs_of(norm)
        random = torch.Generator().manual_seed(1)
        for name, parameter in self.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=random))
            if name == "norm.weight":
                parameter.data.add_(1)[3::16] *= 60
        self.mlp.gate_up_proj.weight.data[:, 3::16] /= 30
        self.requires_grad_(False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.mlp(self.norm(x_TD), NO_CONTEXT)  # type: ignore[no-any-return]

    def smooth(self, x_TD: Tensor) -> list[LinearLayer]:
        layers = smoothable([module for module in self.modules() if isinstance(module, LinearLayer)])
        with record_peaks(layers) as peaks:
            self(x_TD)
        for layer, peak in zip(layers, peaks, strict=True):
            assert peak.num_rows == len(x_TD)
            smooth(layer, peak.values, ParallelState().tensor)
        return layers


NORMS: dict[str, Callable[[], RMSNorm | LayerNorm]] = {
    "rms": lambda: RMSNorm(HIDDEN, 1e-5),
    "offset": lambda: RMSNormRoundedLast(HIDDEN, 1e-5, weight_offset=1.0),
    "layer": lambda: LayerNorm(HIDDEN, 1e-5),
}


@pytest.mark.parametrize("norm", NORMS)
def test_the_function_stays_and_quantised_products_come_closer(norm: str) -> None:
    x_TD = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected_TD = Block(NORMS[norm]())(x_TD)
    errors = []
    for is_smoothed in (False, True):
        block = Block(NORMS[norm]())
        if is_smoothed:
            assert len(block.smooth(x_TD)) == 2
            torch.testing.assert_close(block(x_TD), expected_TD, rtol=1e-3, atol=1e-4)
        for layer in (block.mlp.gate_up_proj, block.mlp.down_proj):
            layer.method = choose_method("int8")(layer)
            layer.method.process_weights_after_loading(layer)
        errors.append(float((block(x_TD) - expected_TD).norm()))
    assert errors[1] < 0.7 * errors[0]


def test_inputs_and_weights_get_equal_ranges() -> None:
    peak_I, largest_I = torch.tensor([9.0, 1.0, 4.0]), torch.tensor([1.0, 1.0, 1.0])
    scales_I = smoothing_scales(peak_I, largest_I)
    assert torch.allclose(scales_I, torch.tensor([1.5, 0.5, 1.0]))
    ratios_I = (peak_I / scales_I) / (largest_I * scales_I)
    assert torch.allclose(ratios_I, ratios_I[0].expand(3))


def test_features_that_are_never_seen_or_never_used_stay() -> None:
    scales_I = smoothing_scales(torch.tensor([0.0, 5.0, torch.inf, 2.0]), torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert scales_I.tolist() == [1.0] * 4
