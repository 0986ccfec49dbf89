"""Fields of `config.json` of models with recurrent layers, from the metadata of their GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.checkpoints.gguf.fields import Metadata

_ATTENTION, _STATE_SPACE = "full_attention", "linear_attention"
_KV_HEADS = ".attention.head_count_kv"


def _kinds(metadata: Metadata, other: str) -> list[str]:
    """Kind of each layer: those with KV heads have attention, and the rest is of the other kind."""
    return [_ATTENTION if heads else other for heads in metadata.by_layer(_KV_HEADS)]


def _with_attention(metadata: Metadata) -> list[int]:
    """Numbers of the layers with attention."""
    return [layer for layer, heads in enumerate(metadata.by_layer(_KV_HEADS)) if heads]


def _state_space(metadata: Metadata) -> dict[str, Any]:
    """Sizes of state-space layers, under the names of Granite and Falcon-H1."""
    num_heads, inner_size = metadata.size(".ssm.time_step_rank"), metadata.size(".ssm.inner_size")
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner_size // num_heads,
        "mamba_n_groups": metadata.size(".ssm.group_count", 1),
        "mamba_d_state": metadata.size(".ssm.state_size"),
        "mamba_d_conv": metadata.size(".ssm.conv_kernel"),
        "mamba_conv_bias": metadata.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.has_tensor("ssm_in.bias"),
    }


def _lfm2(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **decoder,
        "norm_eps": decoder["rms_norm_eps"],
        "conv_L_cache": metadata.size(".shortconv.l_cache"),
        "conv_bias": metadata.has_tensor("shortconv.in_proj.bias"),
        "layer_types": _kinds(metadata, "conv"),
        # The file has the size of the MLPs as it is.
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_lfm2(metadata, decoder),
        "num_experts": metadata.size(".expert_count"),
        "num_experts_per_tok": metadata.size(".expert_used_count"),
        "moe_intermediate_size": metadata.size(".expert_feed_forward_length"),
        "num_dense_layers": metadata.get(".leading_dense_block_count", int, 0),
        "use_expert_bias": metadata.has_tensor("exp_probs_b.bias"),
        "norm_topk_prob": True,
    }


def _falcon_h1(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    """The multipliers are in the weights of the file."""
    return {
        **decoder,
        **_state_space(metadata),
        "mamba_d_ssm": metadata.size(".ssm.inner_size"),
        "mamba_rms_norm": metadata.has_tensor("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": metadata.has_tensor("ssm_out.bias"),
        "attention_bias": metadata.has_tensor("attn_q.bias"),
        "mlp_bias": metadata.has_tensor("ffn_up.bias"),
    }


def is_bamba(metadata: Metadata) -> bool:
    """Whether a file with the architecture of Granite 4's hybrids is one of Bamba, which has rotary embedding."""
    rotates: bool = metadata.get(".rope.scaling.finetuned", bool, False)
    return rotates


def _granite_hybrid(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Granite 4's hybrids, and Bamba."""
    hybrid = {
        **{name: value for name, value in decoder.items() if name != "partial_rotary_factor"},
        **_state_space(metadata),
        "mamba_expand": metadata.size(".ssm.inner_size") // decoder["hidden_size"],
    }
    if is_bamba(metadata):
        return {
            **hybrid,
            "architectures": ["BambaForCausalLM"],
            "model_type": "bamba",
            "attn_layer_indices": _with_attention(metadata),
            "attention_bias": metadata.has_tensor("attn_q.bias"),
            "mlp_bias": metadata.has_tensor("ffn_up.bias"),
        }
    fields = {
        **hybrid,
        "layer_types": _kinds(metadata, _STATE_SPACE),
        "position_embedding_type": None,
        "embedding_multiplier": metadata.get(".embedding_scale", float, 1.0),
        "residual_multiplier": metadata.get(".residual_scale", float, 1.0),
        "attention_multiplier": metadata.get(".attention.scale", float, 1.0),
        "logits_scaling": metadata.get(".logit_scale", float, 1.0),
        "shared_intermediate_size": decoder["intermediate_size"],
        "num_local_experts": 0,
    }
    if not metadata.nonzero(".expert_count", int):
        return fields
    return {
        **fields,
        "num_local_experts": metadata.size(".expert_count"),
        "num_experts_per_tok": metadata.size(".expert_used_count"),
        "shared_intermediate_size": metadata.size(".expert_shared_feed_forward_length"),
    }


def _mamba(metadata: Metadata) -> dict[str, Any]:
    """Mamba, and Falcon-Mamba, which has norms on steps, keys and queries."""
    name, model_type = "MambaForCausalLM", "mamba"
    if metadata.get(".ssm.dt_b_c_rms", bool, False):
        name, model_type = "FalconMambaForCausalLM", "falcon_mamba"
    return {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": metadata.size(".embedding_length"),
        "num_hidden_layers": metadata.size(".block_count"),
        "layer_norm_epsilon": metadata.required(".attention.layer_norm_rms_epsilon", float),
        "intermediate_size": metadata.size(".ssm.inner_size"),
        "state_size": metadata.size(".ssm.state_size"),
        "time_step_rank": metadata.size(".ssm.time_step_rank"),
        "conv_kernel": metadata.size(".ssm.conv_kernel"),
        "use_conv_bias": metadata.has_tensor("ssm_conv1d.bias"),
        "use_bias": metadata.has_tensor("ssm_in.bias"),
    }


def _jamba(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = len(metadata.by_layer(_KV_HEADS))
    with_experts = [layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in metadata.tensors]
    fields = {
        **decoder,
        **_period(metadata, "attn_layer", _with_attention(metadata), num_layers),
        "mamba_expand": metadata.size(".ssm.inner_size") // decoder["hidden_size"],
        "mamba_d_state": metadata.size(".ssm.state_size"),
        "mamba_dt_rank": metadata.size(".ssm.time_step_rank"),
        "mamba_d_conv": metadata.size(".ssm.conv_kernel"),
        "mamba_conv_bias": metadata.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.has_tensor("ssm_in.bias"),
        "num_experts": 1,
    }
    if not with_experts:
        return fields
    return {
        **fields,
        **_period(metadata, "expert_layer", with_experts, num_layers),
        "num_experts": metadata.size(".expert_count"),
        "num_experts_per_tok": metadata.size(".expert_used_count"),
    }


def _period(metadata: Metadata, name: str, layers: list[int], num_layers: int) -> dict[str, int]:
    """Fields of every layer in so many. Raises UnsupportedFeature for layers that are not."""
    # One alone, and none, are of a period that no other layer fits.
    period = layers[1] - layers[0] if len(layers) > 1 else num_layers + 1
    offset = layers[0] if layers else num_layers
    if layers != list(range(offset, num_layers, period)) or offset >= period:
        raise metadata.unsupported(f"{name}s {layers}", "every layer in so many")
    return {f"{name}_period": period, f"{name}_offset": offset}


def _mamba2(metadata: Metadata) -> dict[str, Any]:
    sizes, hidden_size = _state_space(metadata), metadata.size(".embedding_length")
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.size(".block_count"),
        "layer_norm_epsilon": metadata.required(".attention.layer_norm_rms_epsilon", float),
        "num_heads": sizes["mamba_n_heads"],
        "head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "expand": metadata.size(".ssm.inner_size") // hidden_size,
        "use_conv_bias": sizes["mamba_conv_bias"],
        "use_bias": sizes["mamba_proj_bias"],
    }


def _nemotron_h(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    sizes, mlp_sizes = _state_space(metadata), metadata.by_layer(".feed_forward_length")
    kinds = ["mlp" if mlp else kind for mlp, kind in zip(mlp_sizes, _kinds(metadata, _STATE_SPACE), strict=True)]
    return {
        **decoder,
        "layer_norm_epsilon": decoder["rms_norm_eps"],
        "layers_block_type": kinds,
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "use_bias": sizes["mamba_proj_bias"],
        "mlp_bias": metadata.has_tensor("ffn_up.bias"),
    }


def num_target_layers(metadata: Metadata) -> int:
    """Layers without the one for more tokens (MTP), which is the last. Raises UnsupportedFeature for several."""
    num_drafting: int = metadata.get(".nextn_predict_layers", int, 0)
    if num_drafting not in (0, 1):
        raise metadata.unsupported(f"nextn_predict_layers={num_drafting}", "0 and 1")
    return metadata.size(".block_count") - num_drafting


def _nemotron_h_with_experts(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with experts are those with a router."""
    fields, router = _nemotron_h(metadata, decoder), "blk.{}.ffn_gate_inp.weight"
    kinds = [
        "moe" if router.format(layer) in metadata.tensors else kind
        for layer, kind in enumerate(fields["layers_block_type"])
    ]
    latent = f"blk.{kinds.index('moe') if 'moe' in kinds else 0}.ffn_latent_down.weight"
    num_groups = metadata.nonzero(".expert_group_count", int, 1)
    return {
        **fields,
        "layers_block_type": kinds,
        "n_routed_experts": metadata.size(".expert_count"),
        "num_experts_per_tok": metadata.size(".expert_used_count"),
        "moe_intermediate_size": metadata.size(".expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.size(".expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.num_rows(latent) if latent in metadata.tensors else None,
        "routed_scaling_factor": metadata.nonzero(".expert_weights_scale", float, 1.0),
        "norm_topk_prob": metadata.get(".expert_weights_norm", bool, False),
        "n_group": num_groups,
        "topk_group": metadata.nonzero(".expert_group_used_count", int, num_groups),
        "mlp_bias": metadata.has_tensor("ffn_up.bias") or metadata.has_tensor("ffn_up_shexp.bias"),
    }


def _delta(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3.5. Layers without attention have no projection of keys alone."""
    num_heads = metadata.size(".ssm.time_step_rank")
    # As many layers as have tensors, since a damaged file may claim any number.
    num_target = num_target_layers(metadata)
    num_layers = min(num_target, len(metadata.tensors))
    has_attention = [f"blk.{layer}.attn_k.weight" in metadata.tensors for layer in range(num_layers)]
    return {
        **decoder,
        "num_hidden_layers": num_target,
        "mtp_num_hidden_layers": metadata.size(".block_count") - num_target,
        "linear_num_key_heads": metadata.size(".ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": metadata.size(".ssm.state_size"),
        "linear_value_head_dim": metadata.size(".ssm.inner_size") // num_heads,
        "linear_conv_kernel_dim": metadata.size(".ssm.conv_kernel"),
        "layer_types": [_ATTENTION if one else _STATE_SPACE for one in has_attention],
        "attention_bias": metadata.has_tensor("attn_q.bias"),
    }


def _delta_with_experts(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3-Next, and Qwen3.5 with experts."""
    return {
        **_delta(metadata, decoder),
        "num_experts": metadata.size(".expert_count"),
        "num_experts_per_tok": metadata.size(".expert_used_count"),
        "moe_intermediate_size": metadata.size(".expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.size(".expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


# Class in Transformers, and function that makes the fields from those of the plain decoder, by architecture.
RECURRENT: Mapping[str, tuple[str, Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]]] = {
    "falcon-h1": ("FalconH1ForCausalLM", _falcon_h1),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", _granite_hybrid),
    "jamba": ("JambaForCausalLM", _jamba),
    "lfm2": ("Lfm2ForCausalLM", _lfm2),
    "lfm2moe": ("Lfm2MoeForCausalLM", _lfm2moe),
    "nemotron_h": ("NemotronHForCausalLM", _nemotron_h),
    "nemotron_h_moe": ("NemotronHForCausalLM", _nemotron_h_with_experts),
    "qwen35": ("Qwen3_5ForCausalLM", _delta),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", _delta_with_experts),
    "qwen3next": ("Qwen3NextForCausalLM", _delta_with_experts),
}
# Likewise without attention, from the metadata alone.
WITHOUT_ATTENTION: Mapping[str, tuple[str, Callable[[Metadata], dict[str, Any]]]] = {
    "mamba": ("MambaForCausalLM", _mamba),
    "mamba2": ("Mamba2ForCausalLM", _mamba2),
}
