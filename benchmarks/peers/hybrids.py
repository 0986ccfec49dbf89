"""Hybrids of short convolutions and attention for the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.peers.shapes import ModelShape

_CONVOLUTION, _ATTENTION = "conv", "full_attention"


@dataclass(frozen=True)
class ShortConvolutionShape(ModelShape):
    """LFM2: layers of gated short convolutions, and some of attention."""

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        config = self.config
        hidden, head, middle = config["hidden_size"], config["head_dim"], config["intermediate_size"]
        key = config["num_key_value_heads"] * head
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        yield "model.embedding_norm.weight", (hidden,)
        for layer, kind in enumerate(config["layer_types"]):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.operator_norm.weight", (hidden,)
            yield f"{prefix}.ffn_norm.weight", (hidden,)
            yield f"{prefix}.feed_forward.w1.weight", (middle, hidden)
            yield f"{prefix}.feed_forward.w2.weight", (hidden, middle)
            yield f"{prefix}.feed_forward.w3.weight", (middle, hidden)
            if kind == _CONVOLUTION:
                yield f"{prefix}.conv.in_proj.weight", (3 * hidden, hidden)
                yield f"{prefix}.conv.conv.weight", (hidden, 1, config["conv_L_cache"])
                yield f"{prefix}.conv.out_proj.weight", (hidden, hidden)
            else:
                yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
                yield f"{prefix}.self_attn.k_proj.weight", (key, hidden)
                yield f"{prefix}.self_attn.v_proj.weight", (key, hidden)
                yield f"{prefix}.self_attn.out_proj.weight", (hidden, hidden)
                yield f"{prefix}.self_attn.q_layernorm.weight", (head,)
                yield f"{prefix}.self_attn.k_layernorm.weight", (head,)

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        num_layers = config["layer_types"].count(_ATTENTION)
        return 2 * 4 * int(num_layers * config["num_key_value_heads"] * config["head_dim"])


LFM2_350M = ShortConvolutionShape(
    "lfm2-350m",
    "the shape of LFM2-350M: 16 layers of 1024, 6 of attention with 16 heads of 64 (8 for keys), 10 of short "
    "convolutions, 4608 between, vocabulary 65,536, tied",
    {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": 65_536,
        "hidden_size": 1024,
        "intermediate_size": 4608,
        "block_ff_dim": 4608,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "layer_types": [_ATTENTION if layer in (2, 5, 8, 10, 12, 14) else _CONVOLUTION for layer in range(16)],
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "conv_dim": 1024,
        "conv_dim_out": 1024,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "tie_embedding": True,
    },
)
