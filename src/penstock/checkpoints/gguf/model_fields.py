"""`config.json` of a model from the metadata of its GGUF file, for the architectures with an implementation here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.checkpoints.gguf.encoder_fields import ENCODERS
from penstock.checkpoints.gguf.fields import Metadata
from penstock.checkpoints.gguf.mixture_fields import MIXTURES, latent_attention
from penstock.checkpoints.gguf.recurrent_fields import RECURRENT, WITHOUT_ATTENTION
from penstock.errors import UnsupportedModel

_EPSILON, _RMS_EPSILON = ".attention.layer_norm_epsilon", ".attention.layer_norm_rms_epsilon"
# Layers of the largest Gemma models, whose attention scale comes from the hidden size.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
# Rotary base of Gemma 3's sliding windows, and its pattern of layers: five of them, then one of full attention.
_GEMMA3_LOCAL_BASE = 10000.0


def hf_config_of(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of `config.json`.

    Raises UnsupportedModel for other architectures, UnsupportedFeature for fields that cannot be expressed, ModelError
    for missing or invalid ones.
    """
    architecture = metadata.architecture
    if architecture == ENCODERS:
        raise UnsupportedModel(
            f"{metadata.name} has the encoder of images or audio of a multimodal model (an mmproj file, "
            f"general.architecture={architecture!r}), which is no model alone. Give the GGUF file of its language "
            "model, and this file with the option mmproj."
        )
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{metadata.name} has general.architecture={architecture!r}, which cannot be loaded from GGUF here. "
            f"Supported: {', '.join(sorted(_ARCHITECTURES))}. Take the safetensors of the model."
        )
    if metadata.get(".expert_count", int, 0) and architecture not in {*MIXTURES, *RECURRENT}:
        raise UnsupportedModel(
            f"{metadata.name} has {architecture}.expert_count={metadata.get('.expert_count', int)}: a mixture of "
            "experts, which cannot be loaded from GGUF here. Take the safetensors of the model."
        )
    hf_name, read = _ARCHITECTURES[architecture]
    return {
        "architectures": [hf_name],
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": metadata.num_rows("token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", int),
        **read(metadata),
    }


def _decoder(metadata: Metadata) -> dict[str, Any]:
    """Fields of the plain decoder."""
    return {**_sizes(metadata), "rms_norm_eps": metadata.required(_RMS_EPSILON, float)}


def _sizes(metadata: Metadata) -> dict[str, Any]:
    """Sizes, heads and positions of a decoder."""
    hidden_size, num_heads = metadata.size(".embedding_length"), metadata.size(".attention.head_count")
    head_size = metadata.size(".attention.key_length", max(hidden_size // num_heads, 1))
    value_size = metadata.size(".attention.value_length", head_size)
    if value_size != head_size and not latent_attention(metadata):
        raise metadata.unsupported(f"attention.value_length={value_size}", f"attention.key_length={head_size}")
    fields = {
        "hidden_size": hidden_size,
        "intermediate_size": metadata.largest(".feed_forward_length", metadata.get(".expert_feed_forward_length", int)),
        "num_hidden_layers": metadata.size(".block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.largest(".attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "max_position_embeddings": metadata.size(".context_length"),
        "rope_theta": metadata.get(".rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(metadata),
    }
    rotated = metadata.size(".rope.dimension_count", head_size)
    return fields if rotated == head_size else {**fields, "partial_rotary_factor": rotated / head_size}


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Return the rotary scaling.

    Llama 3's scaling is stored as the factor of each frequency, like that of longrope.
    """
    context = metadata.size(".context_length")
    original = metadata.size(".rope.scaling.original_context_length", context)
    both = metadata.float32_values("rope_freqs.weight")
    short = metadata.float32_values("rope_factors_short.weight") or both
    long = metadata.float32_values("rope_factors_long.weight") or both
    attention_factor = metadata.get(".rope.scaling.attn_factor", float, 1.0)
    if short is not None and long is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": attention_factor,
            "original_max_position_embeddings": context if both else original,
        }
    kind = metadata.get(".rope.scaling.type", str, "none")
    factor = metadata.nonzero(".rope.scaling.factor", float, 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn") or attention_factor != 1.0:
        raise metadata.unsupported(
            f"rope.scaling.type={kind!r} with attn_factor={attention_factor}", "none, linear, yarn without attn_factor"
        )
    return {
        "rope_type": kind,
        "factor": factor,
        **({"original_max_position_embeddings": original} if kind == "yarn" else {}),
    }


def _llama(metadata: Metadata) -> dict[str, Any]:
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {**_decoder(metadata), **{name: tensor in metadata.tensors for name, tensor in biases.items()}}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return {**_decoder(metadata), "attention_bias": "blk.0.attn_q.bias" in metadata.tensors}


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    return {
        **_sizes(metadata),
        "norm_epsilon": metadata.required(_EPSILON, float),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": "blk.0.attn_q.bias" in metadata.tensors,
        "sliding_window": metadata.nonzero(".attention.sliding_window", int),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    fields = _decoder(metadata)
    return {
        **fields,
        "sliding_window": metadata.nonzero(".attention.sliding_window", int),
        "original_max_position_embeddings": (fields["rope_scaling"] or {}).get(
            "original_max_position_embeddings", fields["max_position_embeddings"]
        ),
    }


def _gemma(metadata: Metadata, largest: int) -> dict[str, Any]:
    fields = _decoder(metadata)
    # The file has no query_pre_attn_scalar: it follows from the model's size.
    is_largest = fields["num_hidden_layers"] == largest
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if is_largest else fields["head_dim"]
    return {
        **fields,
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.get(".attention.sliding_window", int, 4096),
        "attn_logit_softcapping": metadata.get(".attn_logit_softcapping", float),
        "final_logit_softcapping": metadata.get(".final_logit_softcapping", float),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    caps = {
        "attn_logit_softcapping": metadata.get(".attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": metadata.get(".final_logit_softcapping", float, 30.0),
    }
    return {**_gemma(metadata, _GEMMA2_27B_LAYERS), **caps}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gemma(metadata, _GEMMA3_27B_LAYERS),
        "rope_theta": metadata.get(".rope.freq_base", float, 1_000_000.0),
        "rope_local_base_freq": metadata.get(".rope.freq_base_swa", float, _GEMMA3_LOCAL_BASE),
    }


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    return {
        "n_embd": metadata.size(".embedding_length"),
        "n_head": metadata.size(".attention.head_count"),
        "n_layer": metadata.size(".block_count"),
        "n_inner": metadata.size(".feed_forward_length"),
        "n_positions": metadata.num_rows("position_embd.weight"),
        "layer_norm_epsilon": metadata.required(_EPSILON, float),
        "activation_function": "gelu_new",
    }


def _from_decoder(
    read: Callable[[Metadata, Mapping[str, Any]], dict[str, Any]],
) -> Callable[[Metadata], dict[str, Any]]:
    return lambda metadata: read(metadata, _decoder(metadata))


# Names of model types, where they are not the architecture's.
_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "falcon-h1": "falcon_h1",
    "granitehybrid": "granitemoehybrid",
    "lfm2moe": "lfm2_moe",
    "qwen2moe": "qwen2_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
    "qwen2vl": "qwen2",
}
_ARCHITECTURES: Mapping[str, tuple[str, Callable[[Metadata], dict[str, Any]]]] = {
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "llama": ("LlamaForCausalLM", _llama),
    "olmo2": ("Olmo2ForCausalLM", _decoder),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "qwen2": ("Qwen2ForCausalLM", _decoder),
    "qwen2vl": ("Qwen2ForCausalLM", _decoder),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "starcoder2": ("Starcoder2ForCausalLM", _starcoder2),
    **{name: (hf_name, _from_decoder(read)) for name, (hf_name, read) in {**MIXTURES, **RECURRENT}.items()},
    **WITHOUT_ATTENTION,
}
