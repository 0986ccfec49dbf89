"""Of models as large as people run, the tables say what a run without values counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.device.dtypes import DtypeChoice
from penstock.engine.model_sizes import PlannedModel, _size_without_memory, size_model

pytestmark = pytest.mark.slow
TOLERANCE = 0.01
# As the hub's files have them, some fields left out: by name, architecture and model type.
CONFIGS: dict[str, dict[str, Any]] = {
    "pythia-410m": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    "opt-350m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": False,
        "ffn_dim": 4096,
        "hidden_size": 1024,
        "max_position_embeddings": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "vocab_size": 50272,
        "word_embed_proj_dim": 512,
    },
    "phi-2": {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "max_position_embeddings": 2048,
        "vocab_size": 51200,
        "tie_word_embeddings": False,
    },
    "stablelm-2-1.6b": {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 4096,
        "vocab_size": 100352,
        "use_qkv_bias": True,
        "tie_word_embeddings": False,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "max_position_embeddings": 65536,
        "vocab_size": 128256,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
        "rope_theta": 5000000.0,
    },
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_attention_heads": 24,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "sliding_window": 4096,
        "vocab_size": 49152,
        "rope_theta": 999999.4,
        "use_bias": True,
    },
    "command-r7b": {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "hidden_act": "silu",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "layer_switch": 4,
        "vocab_size": 256000,
        "rope_theta": 50000,
    },
    "glm4-9b": {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "hidden_act": "silu",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.5,
        "vocab_size": 151552,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "granite-3-2b": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "vocab_size": 49155,
        "tie_word_embeddings": True,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen1.5-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "max_position_embeddings": 8192,
        "vocab_size": 151936,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_window_layers": 21,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": None,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 4096,
        "vocab_size": 50304,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_the_hub(tmp_path: Path, name: str, compute: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], "torch_dtype": "bfloat16"}))
    config = EngineConfig.create(str(tmp_path), load_format="dummy")
    dtype = DtypeChoice(compute, "", "bfloat16")
    planned = PlannedModel(config, None, dtype, compute, "cpu", config.model.longest_context)
    derived, counted = size_model(planned), _size_without_memory(planned, "it is asked for")
    assert derived.remark == ""
    assert list(derived.specs.values()) == list(counted.specs.values())
    assert derived.num_heads == counted.num_heads
    assert derived.num_parameters == pytest.approx(counted.num_parameters, rel=TOLERANCE)
    assert derived.weights == pytest.approx(counted.weights, rel=TOLERANCE)
    assert derived.step.activations == pytest.approx(counted.step.activations, rel=TOLERANCE)
    assert derived.step.sampling == counted.step.sampling
