"""GGUF files of small random models, written with the names and layouts that llama.cpp's converter gives them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

# GGUF has Mistral under the name of Llama.
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen2vl": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
}
# Those with an implementation in Penstock, and models of their own in Transformers.
FAMILIES = tuple(family for family in _ARCHITECTURES if family not in ("starcoder2", "qwen2vl"))
_ROTATES_PAIRS = ("llama", "mistral")


def write_gguf(
    model: PreTrainedModel,
    family: str,
    path: Path,
    kind: Type = Type.F32,
    changes: dict[str, Any] | None = None,
    tokens: Sequence[str] = ("t", "1", "t1"),
) -> Path:
    """Write a model. kind: type of the matrices, whose values the model then has, too. changes: other metadata by
    key. tokens: the first ones; in brackets: control tokens.
    """
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[family]])
    _write_fields(writer, model.config, family)
    write_tokens(writer, tokens, model.config.vocab_size)
    for key, value in (changes or {}).items():
        add(writer, key, value)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[family], model.config.num_hidden_layers)
    is_tied = model.config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and is_tied:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if weight.dim() == 1:
            values = _stored(name, weight, model.config, family)
            writer.add_tensor(stored, values.numpy())
            continue
        blocks = quantised(_stored(name, weight, model.config, family).contiguous().numpy(), kind)
        rounded = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
        weight.copy_(_original(name, rounded, model.config, family))
        writer.add_tensor(stored, blocks, raw_dtype=kind)
    finish(writer)
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a field."""
    kinds = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, list: writer.add_array}
    kinds.get(type(value), writer.add_uint32)(key, value)


def _write_fields(writer: gguf.GGUFWriter, config: Any, family: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if family == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    if family == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family != "gemma3":  # its base is a part of rope_parameters, and its default
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def write_tokens(writer: gguf.GGUFWriter, first: Sequence[str], size: int) -> None:
    """Write a byte-level tokenizer of as many tokens."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [*first, *(f"w{index}" for index in range(len(first), size))]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith(("<", "[")) else 1 for token in tokens])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(2)


def _is_transposed(name: str, family: str) -> bool:
    return family == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def _stored(name: str, weight: torch.Tensor, config: Any, family: str) -> torch.Tensor:
    if family in _ROTATES_PAIRS and (heads := _rotated_heads(name, config)):
        return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    return weight.t() if _is_transposed(name, family) else weight


def _original(name: str, stored: torch.Tensor, config: Any, family: str) -> torch.Tensor:
    if family in _ROTATES_PAIRS and (heads := _rotated_heads(name, config)):
        return stored.view(heads, -1, 2, *stored.shape[1:]).transpose(1, 2).reshape(stored.shape)
    return stored.t() if _is_transposed(name, family) else stored


def _rotated_heads(name: str, config: Any) -> int | None:
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", None)}
    return heads.get(name.split(".")[-2])


def quantised(values: np.ndarray, kind: Type, seed: int = 0) -> np.ndarray:
    """Blocks of a matrix; random ones of a type that the package cannot quantise to."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(kind, *values.shape, seed)


def random_blocks(kind: Type, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a type that the package cannot quantise to, with finite scales."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    # Bytes below 0x3c make float16 scales up to 1, wherever a type has them.
    return generator.integers(0, 0x3C, (rows, columns // block_size * block_bytes), dtype=np.uint8)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file of a writer that has its fields and tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
