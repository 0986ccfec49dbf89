"""Checkpoints with MXFP4 experts give the model of the floats that these stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import ModelConfig
from penstock.errors import CheckpointError
from penstock.loader.quantized.mxfp4 import E2M1_VALUES, dequantize_mxfp4
from support.checkpoints import load_config, tiny_checkpoint
from support.plain_attention import sequence_logits
from support.transformers_models import load

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def by_definition(code: int, scale: int) -> float:
    """E2M1: a sign, two bits of exponent with bias 1, one of mantissa, and subnormals. E8M0: an exponent."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return sign * value * 2.0 ** (scale - 127)


def test_every_code_and_scale_has_the_value_of_its_definition() -> None:
    scales = torch.arange(5, 251, dtype=torch.uint8)
    codes = torch.arange(32, dtype=torch.uint8) % 16
    blocks = (codes[::2] | codes[1::2] << 4).expand(len(scales), 1, 16)
    found = dequantize_mxfp4(blocks, scales[:, None])
    expected = [[by_definition(code, scale) for code in codes.tolist()] for scale in scales.tolist()]
    assert torch.equal(found.double(), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(found.bfloat16().float(), found), "bfloat16 holds all of them"
    assert dequantize_mxfp4(blocks[:1], torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


def rounded(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of the nearest codes."""
    grouped = weight_OI.unflatten(-1, (-1, 32))
    exponents = grouped.abs().amax(-1).log2().floor() - 2
    table = torch.tensor(E2M1_VALUES)
    codes = (grouped / exponents.exp2().unsqueeze(-1)).unsqueeze(-1).sub(table).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def write(folder: Path) -> tuple[ModelConfig, ModelConfig]:
    """Configurations of a gpt-oss checkpoint in MXFP4 and of its float twin."""
    tiny_checkpoint(folder / "float", "gpt_oss", intermediate_size=64)
    floats, stored = load_file(folder / "float" / "model.safetensors"), {}
    for name, tensor in floats.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        blocks, scales = (torch.stack(parts) for parts in zip(*map(rounded, tensor.transpose(1, 2)), strict=True))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_float_twin(tmp_path: Path, dtype: torch.dtype) -> None:
    (found,), (expected,) = (sequence_logits(load(config, dtype), [TOKENS]) for config in write(tmp_path))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_can_be_rounded_again(tmp_path: Path, quantization: str) -> None:
    logits = [
        sequence_logits(load(ModelConfig.load(str(config.folder), quantization=quantization)), [TOKENS])[0]
        for config in write(tmp_path)
    ]
    assert torch.equal(*logits)


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    config, _ = write(tmp_path)
    path = config.folder / "model.safetensors"
    tensors = load_file(path)
    scales = tensors.pop("model.layers.0.mlp.experts.down_proj_scales")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"MXFP4 layers are missing: \S*experts.0.down_proj.weight_scales"):
        load(config)
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = scales[..., :1].contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weight_blocks is \[64, 2, 16\].*weight_scales \[64, 1\]"):
        load(config)
