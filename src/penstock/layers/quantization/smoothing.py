"""Smoothing of linear layers' inputs before quantisation (SmoothQuant, Xiao et al., 2023, arXiv:2211.10438).

Trained models have input features that are tens to thousands of times as large as others, and a group of activations
has one scale. Large features are divided by factors that the layer's weights are multiplied by; what computes the
features takes the division, so the model's function stays as it is and products cost nothing more.
Suffixes: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.layers.linear import LinearLayer
from penstock.parallel import Group


def smoothable(layers: Sequence[LinearLayer]) -> list[LinearLayer]:
    """Select the layers whose inputs can be scaled."""
    return [layer for layer in layers if layer.scalable_inputs is not None]


def smooth(layer: LinearLayer, peak_I: Tensor, group: Group) -> None:
    """Scale the layer's inputs and its weight, in place.

    peak_I: largest magnitude of each input feature on calibration data. group: ranks that share the layer.
    """
    inputs = layer.scalable_inputs
    assert inputs is not None, "a smoothable layer"
    layer.method.restore_weights(layer)
    weight_OI = layer.weight.data
    largest_I = weight_OI.abs().amax(dim=0).float()
    if inputs.is_replicated:
        # Ranks may normalise tokens for each other, so all divide by the same factors.
        largest_I = group.all_reduce(largest_I)
    scales_I = smoothing_scales(peak_I, largest_I)
    weight_OI *= scales_I
    layer.method.process_weights_after_loading(layer)
    inputs.divide(scales_I)
    layer.has_smoothed_inputs = True


def smoothing_scales(peak_I: Tensor, largest_I: Tensor) -> Tensor:
    """Factors that give inputs and weights equal ranges: the square root of the ratio of their largest magnitudes.

    largest_I: of the weights. The median factor is 1, as is that of a feature which is always zero.
    """
    is_used_I = (peak_I > 0) & (largest_I > 0) & peak_I.isfinite()
    scales_I = torch.where(is_used_I, peak_I / torch.where(is_used_I, largest_I, 1.0), 1.0).sqrt()
    if not is_used_I.any():
        return torch.ones_like(scales_I)
    return torch.where(is_used_I, scales_I / scales_I[is_used_I].median(), 1.0)
