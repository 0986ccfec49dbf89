"""Models of the comparison, and bytes and FLOP of their steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class ModelShape:
    """A model by its `config.json`, without a dtype."""

    name: str
    title: str
    config: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the checkpoint's tensors."""
        config = self.config
        hidden, head = config["hidden_size"], config["head_dim"]
        query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        if not config["tie_word_embeddings"]:
            yield "lm_head.weight", (self.vocab_size, hidden)
        yield "model.norm.weight", (hidden,)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
            for name, outputs, inputs in (
                ("q_proj", query, hidden),
                ("k_proj", key, hidden),
                ("v_proj", key, hidden),
                ("o_proj", hidden, query),
            ):
                yield f"{prefix}.self_attn.{name}.weight", (outputs, inputs)
                if config.get("attention_bias", False):
                    yield f"{prefix}.self_attn.{name}.bias", (outputs,)
            yield from self._more_weights(prefix)
            if config["model_type"].startswith("qwen3"):
                yield f"{prefix}.self_attn.q_norm.weight", (head,)
                yield f"{prefix}.self_attn.k_norm.weight", (head,)

    def _more_weights(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Weights of a layer beside its attention's projections and norms."""
        hidden, middle = self.config["hidden_size"], self.config["intermediate_size"]
        yield f"{prefix}.mlp.gate_proj.weight", (middle, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (middle, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, middle)

    @property
    def num_head_weights(self) -> int:
        """Weights of the output head."""
        return self.vocab_size * int(self.config["hidden_size"])

    @property
    def num_layer_weights(self) -> int:
        """Weights of all matrices but the embedding and the head, which multiply every token."""
        return sum(shape[0] * shape[1] for name, shape in self.weights() if len(shape) == 2 and ".layers." in name)

    def bytes_per_decoded_token(self, bits_per_weight: float) -> float:
        """Bytes read per token at batch size 1: every matrix once (the KV cache is small in comparison)."""
        return (self.num_layer_weights + self.num_head_weights) * bits_per_weight / 8

    def flop_of_prefill(self, num_tokens: int, num_prompts: int) -> float:
        """Multiplications and additions of the matrices; logits are needed for the last token of each prompt."""
        return 2.0 * (self.num_layer_weights * num_tokens + self.num_head_weights * num_prompts)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of all layers per token, in float32."""
        config = self.config
        return 2 * 4 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])

    @property
    def num_parameters(self) -> int:
        total = 0
        for _, shape in self.weights():
            total += math.prod(shape)
        return total


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            "llama-60m",
            "Llama, 8 layers of 512, 8 heads (4 for keys), 1536 between, vocabulary 32,000",
            {
                **_COMMON,
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 32_000,
                "hidden_size": 512,
                "intermediate_size": 1536,
                "num_hidden_layers": 8,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 64,
                "tie_word_embeddings": False,
            },
        ),
        ModelShape(
            "qwen3-0.6b",
            "the shape of Qwen3-0.6B: 28 layers of 1024, 16 heads of 128 (8 for keys), 3072 between, "
            "vocabulary 151,936, tied",
            {
                **_COMMON,
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "vocab_size": 151_936,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000.0,
                "use_sliding_window": False,
                "max_window_layers": 28,
                "sliding_window": None,
                "tie_word_embeddings": True,
            },
        ),
        ModelShape(
            "smollm2-135m",
            "the shape of SmolLM2-135M: 30 layers of 576, 9 heads of 64 (3 for keys), 1536 between, "
            "vocabulary 49,152, tied",
            {
                **_COMMON,
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 49_152,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
        ),
    )
}
