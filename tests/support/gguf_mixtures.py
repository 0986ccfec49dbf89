"""GGUF files of small random mixtures of experts, with the names and layouts that llama.cpp's converter gives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import PreTrainedModel

from support.gguf_files import finish, quantised, write_tokens

ARCHITECTURES = {
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}
_BLOCK = 32


def write_mixture(model: PreTrainedModel, family: str, path: Path, kind: Type = Type.F32) -> Path:
    """Write a model. kind: type of the matrices with rows of whole blocks, whose values the model then has, too."""
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    _write_fields(writer, config, family)
    write_tokens(writer, ("t", "1", "t1"), config.vocab_size)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    for name, whole in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part_name, part in _parts(name, whole, config):
            stored = names.get_name(part_name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, part_name
            is_exact = part.dim() == 1 or ".bias" in part_name or "router" in part_name or part.shape[-1] % _BLOCK
            chosen = Type.F32 if is_exact or part_name.endswith(".gate.weight") else kind
            blocks = quantised(part.contiguous().numpy(), chosen)
            part.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, chosen).copy()))
            writer.add_tensor(stored, blocks, raw_dtype=chosen)
    finish(writer)
    return path


def _parts(name: str, weight: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Views of a weight of Transformers' model as the file has them, under names that the package gguf knows."""
    prefix, _, last = name.rpartition(".")
    if name.endswith(".experts.gate_up_proj"):
        if config.model_type == "gpt_oss":
            by_output = weight.transpose(1, 2)
            gate, up = by_output[:, ::2], by_output[:, 1::2]
        else:
            gate, up = weight.chunk(2, 1)
        yield f"{prefix}.gate_proj.weight", gate
        yield f"{prefix}.up_proj.weight", up
    elif name.endswith(".experts.gate_up_proj_bias"):
        yield f"{prefix}.gate_proj.bias", weight[:, ::2]
        yield f"{prefix}.up_proj.bias", weight[:, 1::2]
    elif name.endswith(".experts.down_proj"):
        yield f"{name}.weight", weight.transpose(1, 2) if config.model_type == "gpt_oss" else weight
    elif name.endswith(".experts.down_proj_bias"):
        yield f"{prefix}.down_proj.bias", weight
    elif name.endswith(".kv_b_proj.weight"):
        by_head = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
        yield name.replace("kv_b_proj", "k_b_proj"), by_head[:, : config.qk_nope_head_dim].transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), by_head[:, config.qk_nope_head_dim :]
    elif last == "e_score_correction_bias":
        yield f"{prefix.removesuffix('.gate')}.gate.e_score_correction.bias", weight
    elif last == "sinks":
        yield f"{name}.weight", weight
    else:
        yield name, weight


def _write_fields(writer: gguf.GGUFWriter, config: Any, family: str) -> None:
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    writer.add_expert_count(next(getattr(config, name) for name in names if getattr(config, name, None)))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if family.startswith("deepseek"):
        _write_latent_fields(writer, config, family)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    if family != "qwen2_moe":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write_latent_fields(writer: gguf.GGUFWriter, config: Any, family: str) -> None:
    is_v3 = family == "deepseek_v3"
    writer.add_head_count_kv(1)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(is_v3 and config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
