"""Small checkpoints whose weights are integers, written with numpy as the tools of each format lay them out.

Beside each lies nothing but its float twin: the weights that the integers stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from penstock.config import ModelConfig
from support.checkpoints import edit_config, save_checkpoint, tiny_model

Array = NDArray[Any]
# A layer's tensors by kind, and the weight that they stand for.
Layer = tuple[dict[str, Array], Array]
# Mixtral's experts have other names.
_PROJECTION = re.compile(r"_proj|\.experts\.\d+\.w[123]$")
HIDDEN = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Written:
    """config: of the quantised checkpoint. float_folder: the float twin."""

    config: ModelConfig
    float_folder: Path


def write_quantized(
    folder: Path,
    quantize: Callable[[str, Array], Layer],
    quantization_config: Mapping[str, Any],
    family: str = "llama",
    **overrides: Any,
) -> Written:
    """Write a tiny model with every projection quantised; embeddings, head and norms stay float."""
    config = {**HIDDEN, "tie_word_embeddings": False, **overrides}
    save_checkpoint(tiny_model(family, **config), folder / "float")
    floats = load_file(folder / "float" / "model.safetensors")
    integers: dict[str, Array] = {}
    for name, weight in floats.items():
        layer = name.removesuffix(".weight")
        if _PROJECTION.search(layer) and name.endswith(".weight"):
            tensors, floats[name] = quantize(layer, weight)
            integers.update({f"{layer}.{kind}": tensor for kind, tensor in tensors.items()})
        else:
            integers[name] = weight
    save(floats, folder / "float")
    quantized = folder / "quantized"
    quantized.mkdir()
    (quantized / "config.json").write_text((folder / "float" / "config.json").read_text())
    save(integers, quantized)
    return Written(edit_config(quantized, quantization_config=dict(quantization_config)), folder / "float")


def save(tensors: Mapping[str, Array], folder: Path) -> None:
    """Write a checkpoint's only file."""
    in_order = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(in_order, folder / "model.safetensors", {"format": "pt"})


def pack_words(values: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """int32 [R, C / 8] from [R, C]: of each eight numbers, order[i] lies i places from the low end."""
    eights = values.astype(np.uint32).reshape(values.shape[0], -1, 8)[:, :, list(order)]
    return (eights << (4 * np.arange(8, dtype=np.uint32))).sum(axis=2, dtype=np.uint32).view(np.int32)


def int4_grid(weight: Array, group_size: int, *, symmetric: bool = False) -> tuple[Array, Array, Array]:
    """Values [O, I] of 0 to 15, scales [O, G] in float16 and zero points [O, G], by the range of each group."""
    groups = weight.reshape(weight.shape[0], -1, group_size)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    if symmetric:
        scales = (np.abs(groups).max(axis=2) / 7.5).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, 15)
    quotient = np.round(groups / scales.astype(np.float32)[:, :, None]) + zeros[:, :, None]
    return np.clip(quotient, 0, 15).reshape(weight.shape).astype(np.uint8), scales, zeros.astype(np.uint8)


def from_grid(values: Array, scales: Array, zeros: Array, group_of: Array) -> Array:
    """Dequantise to float32. group_of: group index of each input."""
    centred = values.astype(np.float32) - zeros.astype(np.float32)[:, group_of]
    return centred * scales.astype(np.float32)[:, group_of]


def gptq_layer(group_size: int, *, desc_act: bool, version: int = 1) -> Callable[[str, Array], Layer]:
    """GPTQ layer; with desc_act the inputs are permuted, equally for layers with the same input."""

    def quantize(layer: str, weight: Array) -> Layer:
        num_inputs = weight.shape[1]
        group_of = np.arange(num_inputs) // group_size
        if desc_act:
            group_of = np.random.default_rng(num_inputs).permutation(group_of)
        order = np.argsort(group_of, kind="stable")
        ordered, scales, zeros = int4_grid(weight[:, order], group_size)
        values = np.empty_like(ordered)
        values[:, order] = ordered
        stored = pack_words(zeros.T)
        if version == 1:
            stored = (stored.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
        tensors = {
            "qweight": pack_words(values).T,
            "qzeros": stored,
            "scales": scales.T,
            "g_idx": group_of.astype(np.int32),
        }
        return tensors, from_grid(values, scales, zeros, group_of)

    return quantize


def awq_layer(group_size: int) -> Callable[[str, Array], Layer]:
    """AWQ layer; the values of a word are interleaved: 0, 2, 4, 6, 1, 3, 5, 7."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def quantize(layer: str, weight: Array) -> Layer:
        values, scales, zeros = int4_grid(weight, group_size)
        tensors = {
            "qweight": pack_words(values.T, order),
            "qzeros": pack_words(zeros.T, order),
            "scales": scales.T,
        }
        return tensors, from_grid(values, scales, zeros, np.arange(weight.shape[1]) // group_size)

    return quantize


def packed_layer(group_size: int, *, symmetric: bool, reordered: bool = False) -> Callable[[str, Array], Layer]:
    """compressed-tensors' pack-quantized: signed integers with 8 added, zero points packed along the outputs."""

    def quantize(layer: str, weight: Array) -> Layer:
        num_outputs, num_inputs = weight.shape
        group_of = np.arange(num_inputs) // group_size
        if reordered:
            group_of = np.random.default_rng(num_inputs).permutation(group_of)
        order = np.argsort(group_of, kind="stable")
        ordered, scales, zeros = int4_grid(weight[:, order], group_size, symmetric=symmetric)
        values = np.empty_like(ordered)
        values[:, order] = ordered
        tensors = {
            "weight_packed": pack_words(values),
            "weight_scale": scales,
            "weight_shape": np.array([num_outputs, num_inputs], dtype=np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_words(zeros.T).T
        if reordered:
            tensors["weight_g_idx"] = group_of.astype(np.int32)
        return tensors, from_grid(values, scales, zeros, group_of)

    return quantize


def int8_layer(layer: str, weight: Array) -> Layer:
    """compressed-tensors' int-quantized: symmetric, a scale per output, from -128 to 127."""
    scales = (np.abs(weight).max(axis=1, keepdims=True) / 127.5).astype(np.float32)
    values = np.clip(np.round(weight / scales), -128, 127).astype(np.int8)
    return {"weight": values, "weight_scale": scales}, values.astype(np.float32) * scales


def torchao_int8_layer(layer: str, weight: Array) -> Layer:
    """torchao's Int8Tensor."""
    tensors, rounded = int8_layer(layer, weight)
    return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"]}, rounded


def torchao_int4_layer(layer: str, weight: Array) -> Layer:
    """torchao's IntxUnpackedToInt8Tensor: 4 bits from -8 to 7, each in a byte, in groups of 32."""
    values, scales, zeros = int4_grid(weight, 32)
    tensors = {
        "_weight_qdata": values.astype(np.int8) - np.int8(8),
        "_weight_scale": scales,
        "_weight_zero_point": zeros.astype(np.int8) - np.int8(8),
    }
    return tensors, from_grid(values, scales, zeros, np.arange(weight.shape[1]) // 32)


def torchao_config(kind: str, **data: Any) -> dict[str, Any]:
    """torchao's quantization_config, as Transformers writes it into config.json."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


def compressed_config(layout: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> dict[str, Any]:
    """compressed-tensors' quantization_config, as llm-compressor writes it into config.json."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


W8A8 = compressed_config(
    "int-quantized",
    {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False, "group_size": None},
    {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
)


def w4a16(group_size: int | None = 32, *, symmetric: bool = True, actorder: str | None = None) -> dict[str, Any]:
    """4-bit weights in groups; None: one group per output."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": actorder,
    }
    return compressed_config("pack-quantized", weights, None)


def edit_tensors(folder: Path, change: Callable[[dict[str, Array]], None]) -> None:
    """Change the tensors of a saved checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save(tensors, folder)


def float_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a checkpoint."""
    return {name: torch.from_numpy(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}


def read_json(path: Path) -> dict[str, Any]:
    """Load a JSON object."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content
