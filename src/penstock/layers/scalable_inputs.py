"""Exact scaling of linear layers' inputs, by the weights of what computes them. Suffixes: I input features."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.layers.norm import LayerNorm, NoNorm, RMSNorm, RMSNormRoundedLast
from penstock.layers.parallel_linear import MergedColumnParallelLinear
from penstock.layers.weights import Shard


@dataclass(frozen=True, slots=True)
class NormOutputs:
    """Inputs that are a norm's outputs, which no other layer reads."""

    norm: RMSNorm | LayerNorm
    is_replicated = True

    def divide(self, scales_I: Tensor) -> None:
        norm = self.norm
        offset = norm.weight_offset if isinstance(norm, RMSNormRoundedLast) else 0.0
        norm.weight.data.add_(offset).div_(scales_I).sub_(offset)
        if isinstance(norm, LayerNorm) and norm.bias is not None:
            norm.bias.data.div_(scales_I)


@dataclass(frozen=True, slots=True)
class FactorOutputs:
    """Inputs that are products, element by element, of which one factor is a shard of another layer's outputs."""

    layer: MergedColumnParallelLinear
    shard: Shard
    is_replicated = False

    def divide(self, scales_I: Tensor) -> None:
        layer, rows = self.layer, self.layer.rows_of(self.shard)
        layer.method.restore_weights(layer)
        layer.weight.data[rows] /= scales_I.unsqueeze(1)
        if layer.bias is not None:
            layer.bias.data[rows] /= scales_I
        layer.method.process_weights_after_loading(layer)


def outputs_of(norm: RMSNorm | LayerNorm | NoNorm) -> NormOutputs | None:
    """Return the outputs of a norm as inputs that can be scaled; None without a norm."""
    return None if isinstance(norm, NoNorm) else NormOutputs(norm)
