"""Configurations as they lie beside published checkpoints of full size: understood as Transformers understands them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config import ModelConfig
from penstock.models.attention_layers import attention_layers
from penstock.models.registry import find_model_class
from penstock.parallel import ParallelState

PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "phi-3-mini-4k": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    },
    "phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "phi3",
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 199999,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": 256000,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "initializer_range": 0.02,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 262144,
    },
    "ernie-4.5-0.3b": {
        "architectures": ["Ernie4_5ForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5",
        "num_attention_heads": 16,
        "num_hidden_layers": 18,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_cache": True,
        "vocab_size": 103424,
    },
    "olmo-2-7b": {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": 100352,
    },
}
# As published, so that the configurations above are of those very models.
NUM_PARAMETERS = {
    "gpt2": 124_439_808,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "ernie-4.5-0.3b": 360_748_032,
    "olmo-2-7b": 7_298_617_344,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_shapes_and_windows_are_those_of_transformers(name: str) -> None:
    content = PUBLISHED[name]
    config = ModelConfig("some/model", Path("nowhere"), Path("nowhere"), dict(content), {}, max_model_len=1024)
    with torch.device("meta"):
        model = find_model_class(config)(config, ParallelState())
        hf_config = AutoConfig.for_model(**content)
        oracle = AutoModelForCausalLM.from_config(hf_config)
    expected = {tensor_name: tuple(tensor.shape) for tensor_name, tensor in oracle.state_dict().items()}
    slots = {slot_name: slot.shape for slot_name, slot in model.checkpoint_slots().items()}
    tied = hf_config.tie_word_embeddings
    assert slots == {key: shape for key, shape in expected.items() if not (tied and key == "lm_head.weight")}
    assert sum(parameter.numel() for parameter in oracle.parameters()) == NUM_PARAMETERS[name]

    window = getattr(hf_config, "sliding_window", None)
    kinds = getattr(hf_config, "layer_types", None) or ["sliding_attention"] * hf_config.num_hidden_layers
    windows = [layer.sliding_window for layer in attention_layers(model).values()]
    assert windows == [window if kind == "sliding_attention" else None for kind in kinds]
