"""What makes integers of a model's weights while they are loaded, if anything does."""

from __future__ import annotations

import torch

from penstock.config import LoadConfig, ModelConfig
from penstock.errors import UnsupportedFeature
from penstock.layers.quantization.choose import choose_method
from penstock.loader.quantized.assembly import OptionRounding, Rounding


def choose_rounding(model_config: ModelConfig, load_config: LoadConfig, device: torch.device) -> Rounding | None:
    """None for weights that stay in floating point.

    Raises UnsupportedFeature for a device that has no products with them.
    """
    option = model_config.quantization
    if option is None:
        return None
    refuse_quantization_on(device, option)
    return OptionRounding(choose_method(option, model_config.vocab_size))


def refuse_quantization_on(device: torch.device, quantization: str) -> None:
    """Raises UnsupportedFeature where there are no products with quantised weights."""
    if device.type != "cpu":
        raise UnsupportedFeature(
            f"quantization={quantization!r} is not supported on {device.type} yet. Use device='cpu', or none."
        )
