"""Checkpoints with scales of an FP8 KV cache, and Transformers' attention over keys and values in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.config import ModelConfig
from support.checkpoints import edit_config, load_config, tiny_model

# Keys' and values' scale of each layer.
SCALES = ((0.02, 8.0), (0.07, 6.0))
# Values are so much larger than usual, and outputs divided by it.
_WIDE = 300.0
_NAME = "float8_cache"
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def scaled_model(family: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A model whose values exceed 448, and which attends to keys and values in FP8 with `SCALES`."""
    model = tiny_model(family, **overrides)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= _WIDE
            layer.self_attn.o_proj.weight /= _WIDE
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, eager_mask)
    model.config._attn_implementation = _NAME
    return model


def save_scaled(
    model: PreTrainedModel, folder: Path, names: tuple[str, str] = ("k_scale", "v_scale"), **config: Any
) -> ModelConfig:
    """Save a model with `SCALES`, under these names behind that of each layer's attention."""
    model.save_pretrained(folder)
    add_tensors(
        folder,
        {
            f"model.layers.{layer}.self_attn.{name}": torch.tensor(scale)
            for layer, scales in enumerate(SCALES)
            for name, scale in zip(names, scales, strict=True)
        },
    )
    return edit_config(folder, **config) if config else load_config(folder)


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})


def _attend(
    module: Any,
    query_BHTD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    key_scale, value_scale = SCALES[module.layer_idx]
    group_size = query_BHTD.shape[1] // key_BKLD.shape[1]
    key, value = (
        ((given / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).repeat_interleave(group_size, 1)
        for given, scale in ((key_BKLD, key_scale), (value_BKLD, value_scale))
    )
    scores = query_BHTD @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None
