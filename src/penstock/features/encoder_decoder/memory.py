"""Memory of encoding a source, which the profile run leaves out."""

from __future__ import annotations

from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.features.encoder_decoder.second_pass import FILTER_WIDTH
from penstock.layers.linear import LinearLayer


def encoder_bytes(config: EngineConfig, model: Any, _: str, dtype: torch.dtype) -> int:
    """Bytes of the activations of the longest source.

    At once a layer has the stream, its norm, the inputs and outputs of its widest product, and the keys and values of
    a layer of cross attention; attention of torch's has the scores of all heads too, where biases are added to them.
    A second pass over the longest text has the attention of its tokens to the source.
    """
    positions: int = model.sources.longest
    products = [module for module in model.encoder.modules() if isinstance(module, LinearLayer)]
    widest = max(layer.input_size + layer.output_size for layer in products)
    hidden = config.model.hidden_size
    scores: int = 2 * model.encoder_heads * positions if model.encoder_heads else 0
    num_bytes: int = positions * (4 * hidden + 2 * widest + scores) * dtype.itemsize
    heads = config.model.hf_generation_config.get("alignment_heads")
    if not heads:
        return num_bytes
    # Weights of all heads in float32, those of one with the windows of its median filter, and keys and values.
    weights: int = model.config.num_positions * (len(heads) + 2 * FILTER_WIDTH) * torch.float32.itemsize
    return max(num_bytes, positions * (weights + 4 * hidden * dtype.itemsize))
