"""Memory of encoding a source, which the profile run leaves out."""

from __future__ import annotations

from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.layers.linear import LinearLayer


def encoder_bytes(config: EngineConfig, model: Any, _: str, dtype: torch.dtype) -> int:
    """Bytes of the activations of the longest source.

    At once a layer has the stream, its norm, the inputs and outputs of its widest product, and the keys and values of
    a layer of cross attention; attention of torch's has the scores of all heads too, where biases are added to them.
    """
    positions: int = model.sources.longest
    products = [module for module in model.encoder.modules() if isinstance(module, LinearLayer)]
    widest = max(layer.input_size + layer.output_size for layer in products)
    hidden = config.model.hidden_size
    scores: int = 2 * model.encoder_heads * positions if model.encoder_heads else 0
    return positions * (4 * hidden + 2 * widest + scores) * dtype.itemsize
