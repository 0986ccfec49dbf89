"""Small gpt-oss checkpoints whose experts are in MXFP4, and their float twins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import ModelConfig
from penstock.loader.quantized.mxfp4 import E2M1_VALUES, dequantize_mxfp4
from support.checkpoints import load_config, tiny_checkpoint


def rounded_to_mxfp4(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of the nearest codes."""
    grouped = weight_OI.unflatten(-1, (-1, 32))
    exponents = grouped.abs().amax(-1).log2().floor() - 2
    table = torch.tensor(E2M1_VALUES)
    codes = (grouped / exponents.exp2().unsqueeze(-1)).unsqueeze(-1).sub(table).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def write_mxfp4(folder: Path, **overrides: Any) -> tuple[ModelConfig, ModelConfig]:
    """Configurations of a gpt-oss checkpoint in MXFP4 and of its float twin."""
    tiny_checkpoint(folder / "float", "gpt_oss", **{"intermediate_size": 64, **overrides})
    floats, stored = load_file(folder / "float" / "model.safetensors"), {}
    for name, tensor in floats.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        blocks, scales = (
            torch.stack(parts) for parts in zip(*map(rounded_to_mxfp4, tensor.transpose(1, 2)), strict=True)
        )
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        values = torch.stack([dequantize_mxfp4(*pair) for pair in zip(blocks, scales, strict=True)])
        floats[name] = values.transpose(1, 2).contiguous()
    save_file(floats, folder / "float" / "model.safetensors", {"format": "pt"})
    (folder / "mxfp4").mkdir()
    config = json.loads((folder / "float" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "mxfp4" / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "mxfp4" / "model.safetensors", {"format": "pt"})
    return load_config(folder / "mxfp4"), load_config(folder / "float")
