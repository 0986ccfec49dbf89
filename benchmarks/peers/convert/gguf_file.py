"""A checkpoint as GGUF: python -m benchmarks.peers.convert.gguf_file CHECKPOINT FOLDER f32|bf16|q8_0.

Needs the package gguf. Names and the order of rows are those that llama.cpp's own converter writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

_ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_QUANTIZATIONS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def convert(checkpoint: Path, folder: Path, precision: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", _ARCHITECTURES[config["model_type"]])
    _write_fields(writer, config, precision)
    with safe_open(checkpoint / "model.safetensors", framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            _write_tensor(writer, name, file.get_tensor(name), config, precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_fields(writer: gguf.GGUFWriter, config: dict[str, Any], precision: str) -> None:
    head_dim = config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(_FILE_TYPES[precision])


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, config: dict[str, Any], precision: str
) -> None:
    if config["model_type"] == "llama":
        if "q_proj" in name:
            values = _pair_neighbours(values, config["num_attention_heads"])
        elif "k_proj" in name:
            values = _pair_neighbours(values, config["num_key_value_heads"])
    kind = _QUANTIZATIONS["f32" if values.ndim == 1 else precision]
    data = values if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(values, kind)
    writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)


def _pair_neighbours(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF's llama rotates neighbouring elements of a head, where the checkpoint has them half a head apart."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _OTHER_NAMES:
        return f"{_OTHER_NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.weight"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
