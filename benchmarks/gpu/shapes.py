"""Shapes of the models that the GPU benchmarks run with random weights, and what a step of them must read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """config: the fields of config.json. options: of the engine. bytes_per_weight, bytes_per_kv: of
    weights that a step reads, and of a value of the KV cache.
    """

    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    bytes_per_weight: float = 2.0
    bytes_per_kv: int = 2

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def num_weights_read(self) -> int:
        """Weights that every decode step reads: all but an untied table of input embeddings."""
        config = self.config
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        attention = hidden * (heads + 2 * kv_heads) * size + heads * size * hidden
        return int(layers * (attention + 3 * hidden * config["intermediate_size"]) + hidden * config["vocab_size"])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one position."""
        config = self.config
        return int(
            2 * self.bytes_per_kv * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        )

    def decode_bytes(self, num_reqs: int, context: int) -> int:
        """Bytes that a decode step reads."""
        return int(self.bytes_per_weight * self.num_weights_read) + num_reqs * context * self.kv_bytes_per_token

    def prefill_flops(self, num_prompts: int, length: int) -> float:
        """Floating-point operations of prompts: products with weights, and causal attention."""
        config = self.config
        products = 2.0 * (self.num_weights_read - config["hidden_size"] * config["vocab_size"]) * num_prompts * length
        width = config["num_attention_heads"] * config["head_dim"]
        return float(products + 2.0 * config["num_hidden_layers"] * num_prompts * length**2 * width)


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES = {
    "llama-8b": Shape(
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        }
    ),
    "qwen3-0.6b": Shape(
        {
            **_LLAMA,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "rms_norm_eps": 1e-6,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 8192,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        }
    ),
    "tiny": Shape(
        {
            **_LLAMA,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 1000,
            "max_position_embeddings": 8192,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "dtype": "float32",
            "torch_dtype": "float32",
        }
    ),
}

# Quantised while loading, with another KV cache, or batch-invariant: int4 has a scale in float32 and a zero point for
# each 128 inputs.
SHAPES |= {
    "llama-8b-fp8-kv": replace(SHAPES["llama-8b"], options={"kv_cache_dtype": "fp8"}, bytes_per_kv=1),
    "qwen3-0.6b-pieces": replace(SHAPES["qwen3-0.6b"], options={"cudagraph_mode": "full_and_piecewise"}),
    "qwen3-0.6b-full": replace(SHAPES["qwen3-0.6b"], options={"cudagraph_mode": "full"}),
    "llama-8b-invariant": replace(SHAPES["llama-8b"], options={"batch_invariant": True}),
    "llama-8b-int8": replace(SHAPES["llama-8b"], options={"quantization": "int8"}, bytes_per_weight=1.0),
    "llama-8b-int4": replace(SHAPES["llama-8b"], options={"quantization": "int4"}, bytes_per_weight=0.5 + 5 / 128),
}
