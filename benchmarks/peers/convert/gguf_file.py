"""A checkpoint as GGUF: python -m benchmarks.peers.convert.gguf_file CHECKPOINT FOLDER f32|bf16|q8_0.

Needs the package gguf. Names and the order of rows are those that llama.cpp's own converter writes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

_GPT_OSS, _LFM2, _GRANITE_HYBRID = "gpt_oss", "lfm2", "granitemoehybrid"
_ARCHITECTURES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    _GPT_OSS: "gpt-oss",
    _LFM2: "lfm2",
    _GRANITE_HYBRID: "granitehybrid",
}
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
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "shared_mlp.gate_proj": "ffn_gate",
    "shared_mlp.up_proj": "ffn_up",
    "shared_mlp.output_linear": "ffn_down",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
# Of layers that keep a state: in float32 whatever the file's type.
_EXACT = ("shortconv.conv", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")
_OF_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(.*)")
_OTHER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
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
        for name, values in _tensors(file, config):
            _write_tensor(writer, name, values, config, precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(file: Any, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors by the names of one expert's, `mlp.experts.gate_proj.weight` and so on, with all experts of a layer."""
    for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
        expert = _OF_EXPERT.fullmatch(name)
        if expert is not None:
            before, number, rest = expert.groups()
            if number == "0":
                yield (
                    f"{before}.{rest}",
                    np.stack([file.get_tensor(f"{before}.{index}.{rest}") for index in range(config["num_experts"])]),
                )
        elif ".experts." in name:
            yield from _stacked(name, file.get_tensor(name))
        elif ".input_linear." in name:
            for part, half in zip(("gate_proj", "up_proj"), np.split(file.get_tensor(name), 2), strict=True):
                yield name.replace("input_linear", part), np.ascontiguousarray(half)
        else:
            yield name, file.get_tensor(name)


def _stacked(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """gpt-oss's experts: matrices are [inputs, outputs], and outputs of gate and up alternate."""
    kind = "bias" if name.endswith("_bias") else "weight"
    stem = name.removesuffix("_bias")
    if kind == "weight":
        values = values.swapaxes(1, 2)
    if not stem.endswith("gate_up_proj"):
        yield f"{stem}.{kind}", np.ascontiguousarray(values)
        return
    for part, begin in (("gate_proj", 0), ("up_proj", 1)):
        yield stem.replace("gate_up_proj", part) + f".{kind}", np.ascontiguousarray(values[:, begin::2])


def _write_fields(writer: gguf.GGUFWriter, config: dict[str, Any], precision: str) -> None:
    head_dim = config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    num_kv_heads = config["num_key_value_heads"]
    if config["model_type"] in (_LFM2, _GRANITE_HYBRID):
        kinds = config["layer_types"]
        writer.add_head_count_kv([num_kv_heads if "attention" in kind else 0 for kind in kinds])
    else:
        writer.add_head_count_kv(num_kv_heads)
    if config["model_type"] == _LFM2:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if config["model_type"] == _GRANITE_HYBRID:
        _write_granite_hybrid(writer, config)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("num_experts_per_tok"):
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config["model_type"] == _GPT_OSS:
        scaling = config["rope_scaling"]
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(_FILE_TYPES[precision])


def _write_granite_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_scaling_finetuned(False)
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_state_size(config["mamba_d_state"])


def _as_stored(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Parameters of recurrent layers: taps without their middle dimension, rates, and columns of heads."""
    if name.endswith((".conv.conv.weight", ".conv1d.weight")):
        return values.squeeze(1)
    if name.endswith(".A_log"):
        return -np.exp(values)[:, None]
    if name.endswith(".D"):
        return values[:, None]
    if name.endswith(".mamba.norm.weight"):
        return values.reshape(config["mamba_n_groups"], -1)
    return values


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, config: dict[str, Any], precision: str
) -> None:
    if config["model_type"] == "llama":
        if "q_proj" in name:
            values = _pair_neighbours(values, config["num_attention_heads"])
        elif "k_proj" in name:
            values = _pair_neighbours(values, config["num_key_value_heads"])
    gguf_name, values = _gguf_name(name, config), _as_stored(name, values, config)
    is_exact = (
        values.ndim == 1
        or any(part in gguf_name for part in _EXACT)
        or gguf_name.endswith(".bias")
        or "ffn_gate_inp" in gguf_name
    )
    kind = _QUANTIZATIONS["f32" if is_exact else precision]
    data = values if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(values, kind)
    writer.add_tensor(gguf_name, data, raw_dtype=kind)


def _pair_neighbours(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF's llama rotates neighbouring elements of a head, where the checkpoint has them half a head apart."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _gguf_name(name: str, config: dict[str, Any]) -> str:
    kind = "bias" if name.endswith(".bias") else "weight"
    stem = name.removesuffix(f".{kind}")
    if stem in _OTHER_NAMES:
        return f"{_OTHER_NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    ours = _LAYER_NAMES[rest]
    if not name.endswith((".bias", ".weight")):  # a parameter of the layer itself
        return f"blk.{layer}.{ours}"
    if config["model_type"] == _GPT_OSS and ours == "ffn_norm":
        ours = "post_attention_norm"
    return f"blk.{layer}.{ours}.{kind}"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
