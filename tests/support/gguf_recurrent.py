"""GGUF files of small random models with recurrent layers, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import PreTrainedModel

from support.gguf_files import finish, quantised, write_tokens

ARCHITECTURES = {
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "bamba": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "falcon_mamba": gguf.MODEL_ARCH.MAMBA,
    "jamba": gguf.MODEL_ARCH.JAMBA,
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "nemotron_h_moe": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE,
}
_SELECTIVE = ("mamba", "falcon_mamba", "jamba")
_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_OF_MAMBA = ("ssm_in", "ssm_x", "ssm_dt", "ssm_out")
_OF_DRAFTING = {
    "fc": gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
    "pre_fc_norm_embedding": gguf.MODEL_TENSOR.NEXTN_ENORM,
    "pre_fc_norm_hidden": gguf.MODEL_TENSOR.NEXTN_HNORM,
    "norm": gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
}
_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def write_recurrent(model: PreTrainedModel, family: str, path: Path, kind: Type = Type.F32) -> Path:
    """Write a model in float32. kind: type of the matrices of MLPs and of Mamba, whose values the model then has."""
    return write_weights(model.state_dict(), model.config, family, path, kind)


def write_weights(
    weights: Mapping[str, Tensor],
    config: Any,
    family: str,
    path: Path,
    matrices: Type = Type.F32,
    num_drafting: int = 0,
) -> Path:
    """Write weights, likewise. num_drafting: layers for more tokens, whose weights are under `mtp`."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    _write_fields(writer, config, family, config.num_hidden_layers + num_drafting)
    if num_drafting:
        writer.add_nextn_predict_layers(num_drafting)
    write_tokens(writer, ("t", "1", "t1"), config.vocab_size)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers + num_drafting)
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for stored, part in _stored(name, weight.float(), config, family, names):
            is_matrix = stored.endswith(".weight") and stored.rpartition(".")[0].endswith((*_MLP, *_OF_MAMBA))
            kind = matrices if is_matrix else Type.F32
            blocks = quantised(part.contiguous().numpy(), kind)
            if kind is not Type.F32:
                part.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy()))
            writer.add_tensor(stored, blocks, raw_dtype=kind)
    finish(writer)
    return path


def _stored(name: str, weight: Tensor, config: Any, family: str, names: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a weight, under their names in the file."""
    if name.startswith("mtp."):
        name = name.replace("mtp.layers.0", f"model.layers.{config.num_hidden_layers}")
        kind = _OF_DRAFTING.get(name.removeprefix("mtp.").removesuffix(".weight"))
        if kind is not None:
            stored = gguf.TENSOR_NAMES[kind].format(bid=config.num_hidden_layers)
            yield f"{stored}.weight", weight if name == "mtp.fc.weight" else weight + 1
            return
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith(".experts.gate_up_proj"):
        for kind, half in zip(("w1", "w3"), weight.chunk(2, 1), strict=True):
            yield f"blk.{layer}.{_EXPERTS[kind]}.weight", half
        return
    if name.endswith((".experts.down_proj", ".experts.up_proj")):
        yield f"blk.{layer}.ffn_{name.rpartition('.')[2].removesuffix('_proj')}_exps.weight", weight
        return
    if name.endswith(".shared_mlp.input_linear.weight"):
        for kind, half in zip(("gate", "up"), weight.chunk(2), strict=True):
            yield f"blk.{layer}.ffn_{kind}{_of_shared(config)}.weight", half
        return
    if name.endswith(".shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{_of_shared(config)}.weight", weight
        return
    if name.endswith(".router.weight"):
        yield f"blk.{layer}.ffn_gate_inp.weight", weight
        return
    if family == "bamba" and name.endswith((".q_proj.weight", ".k_proj.weight")):
        # All pairs of a head side by side, whatever part of it rotates.
        half = config.hidden_size // config.num_attention_heads // 2
        weight = weight.view(-1, 2, half, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    if family == "falcon_h1":
        weight = _with_multipliers(name, weight, config)
    if family in _DELTA and name.endswith("norm.weight") and ".linear_attn." not in name:
        weight = weight + 1
    if family in ("qwen3_5", "qwen3_5_moe"):
        weight = _by_place(name, weight, config)
    if name.endswith(".in_proj_qkvz.weight"):
        yield from _parts_of_delta(layer, weight, config)
        return
    if name.endswith(".A_log") and family in _DELTA:
        yield f"blk.{layer}.ssm_a", -weight.exp()
        return
    if name.endswith((".conv.conv.weight", ".conv1d.weight")):
        weight = weight.squeeze(1)
    if name.endswith(".A_log"):
        weight = -weight.exp()
    if name.endswith((".A_log", ".D")) and family not in _SELECTIVE:
        weight = weight.unsqueeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        weight = weight.view(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
    name = name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
    if family.startswith("nemotron_h"):
        name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
        name = name.replace("model.", "backbone.")
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    yield stored, weight


def _of_shared(config: Any) -> str:
    """What names of MLPs end with: a model with experts has them beside these."""
    return "_shexp" if config.num_local_experts else ""


def _by_place(name: str, weight: Tensor, config: Any) -> Tensor:
    """Value heads of delta rules with the first ones of all key heads before the second ones."""
    num_keys, num_heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys, size = 2 * num_keys * config.linear_key_head_dim, config.linear_value_head_dim

    def moved(rows: Tensor, size: int) -> Tensor:
        return rows.reshape(num_keys, num_heads // num_keys, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return weight
    if name.endswith("out_proj.weight"):
        return moved(weight.t(), size).t()
    if name.endswith((".conv1d.weight", ".in_proj_qkv.weight")):
        return torch.cat((weight[:keys], moved(weight[keys:], size)))
    return moved(weight, size if name.endswith("in_proj_z.weight") else 1)


def _parts_of_delta(layer: str, weight: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Queries, keys and values of all heads, and their gates."""
    num_keys, key_size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // num_keys * config.linear_value_head_dim
    parts = weight.unflatten(0, (num_keys, -1)).split([key_size, key_size, values, values], 1)
    *qkv, gates = (part.flatten(0, 1) for part in parts)
    yield f"blk.{layer}.attn_qkv.weight", torch.cat(qkv)
    yield f"blk.{layer}.attn_gate.weight", gates


def _with_multipliers(name: str, weight: Tensor, config: Any) -> Tensor:
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
    }
    module = name.split(".")[-2]
    if module != "in_proj":
        return weight * factors.get(module, 1.0)
    keys = config.mamba_n_groups * config.mamba_d_state
    sizes = [config.mamba_d_ssm] * 2 + [keys] * 2 + [config.mamba_n_heads]
    parts = zip(weight.split(sizes), config.ssm_multipliers, strict=True)
    return torch.cat([part * factor * config.ssm_in_multiplier for part, factor in parts])


def _write_fields(writer: gguf.GGUFWriter, config: Any, family: str, num_layers: int) -> None:
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(num_layers)
    writer.add_layer_norm_rms_eps(
        getattr(config, "norm_eps", None) or getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
    )
    if family in ("mamba", "falcon_mamba", "mamba2"):
        writer.add_context_length(2**20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    if family in ("mamba", "falcon_mamba"):
        _write_selective(writer, config.conv_kernel, config.intermediate_size, config.state_size, config.time_step_rank)
        writer.add_ssm_dt_b_c_rms(family == "falcon_mamba")
        return
    if family == "mamba2":
        _write_state_space(writer, config.num_heads, config.head_dim, config.n_groups, config.state_size)
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    kinds = _kinds(config, family)
    if family in _DELTA:
        _write_delta(writer, config)
        return
    kv_heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds]
    writer.add_head_count_kv(config.num_key_value_heads if family == "falcon_h1" else kv_heads)
    if family == "nemotron_h_moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if family.startswith("nemotron_h"):
        writer.add_feed_forward_length([config.intermediate_size if kind == "mlp" else 0 for kind in kinds])
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        heads = config.mamba_num_heads, config.mamba_head_dim
        _write_state_space(writer, *heads, config.n_groups, config.ssm_state_size)
        return
    if family == "jamba":
        inner_size = config.mamba_expand * config.hidden_size
        sizes = config.mamba_d_conv, inner_size, config.mamba_d_state, config.mamba_dt_rank
        _write_selective(writer, *sizes)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        return
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "bamba":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads // 2)
        writer.add_rope_scaling_finetuned(True)
        writer.add_feed_forward_length(config.intermediate_size)
        heads = config.mamba_n_heads, config.mamba_d_head
        _write_state_space(writer, *heads, config.mamba_n_groups, config.mamba_d_state)
        return
    if family == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(False)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        _write_state_space(
            writer, config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state
        )
        if not config.num_local_experts:
            writer.add_feed_forward_length(config.shared_intermediate_size)
            return
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        return
    if family == "falcon_h1":
        writer.add_feed_forward_length(config.intermediate_size)
        heads = config.mamba_n_heads, config.mamba_d_head
        _write_state_space(writer, *heads, config.mamba_n_groups, config.mamba_d_state)
        return
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_feed_forward_length(config.intermediate_size)
    if family == "lfm2_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _kinds(config: Any, family: str) -> list[str]:
    """Kind of each layer; other ones than attention may have any name."""
    layers = range(config.num_hidden_layers)
    if family == "bamba":
        return ["full_attention" if layer in config.attn_layer_indices else "" for layer in layers]
    if family == "jamba":
        period, offset = config.attn_layer_period, config.attn_layer_offset
        return ["full_attention" if layer % period == offset else "" for layer in layers]
    return ["full_attention"] * len(layers) if family == "falcon_h1" else config.layer_types


def _write_selective(writer: gguf.GGUFWriter, num_taps: int, inner_size: int, state_size: int, rank: int) -> None:
    writer.add_ssm_conv_kernel(num_taps)
    writer.add_ssm_inner_size(inner_size)
    writer.add_ssm_state_size(state_size)
    writer.add_ssm_time_step_rank(rank)


def _write_delta(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    heads = config.linear_num_value_heads, config.linear_value_head_dim
    _write_state_space(writer, *heads, config.linear_num_key_heads, config.linear_key_head_dim)
    if not hasattr(config, "num_experts"):
        writer.add_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write_state_space(writer: gguf.GGUFWriter, num_heads: int, head_size: int, groups: int, state_size: int) -> None:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(num_heads * head_size)
    writer.add_ssm_state_size(state_size)
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_group_count(groups)
