"""Hybrids of recurrent layers and attention for the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.peers.shapes import ModelShape

_CONVOLUTION, _ATTENTION = "conv", "full_attention"
# Names of Granite's layers.
_STATE_SPACE, _MIXING = "mamba", "attention"
# Of the cache of states: requests at once, and as many snapshots; and the tokens over which its bytes are spread.
_NUM_STATES, _NUM_TOKENS = 64, 16_384


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
        "block_dim": 1024,
        "block_ff_dim": 4608,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
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


@dataclass(frozen=True)
class StateSpaceShape(ModelShape):
    """Granite 4: layers of Mamba 2, and some of attention without positions."""

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        config = self.config
        hidden, middle, head = config["hidden_size"], config["shared_intermediate_size"], config["head_dim"]
        key, heads = config["num_key_value_heads"] * head, config["mamba_n_heads"]
        inner = heads * config["mamba_d_head"]
        mixed = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        yield "model.norm.weight", (hidden,)
        for layer, kind in enumerate(config["layer_types"]):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
            yield f"{prefix}.shared_mlp.input_linear.weight", (2 * middle, hidden)
            yield f"{prefix}.shared_mlp.output_linear.weight", (hidden, middle)
            if kind == _MIXING:
                yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
                yield f"{prefix}.self_attn.k_proj.weight", (key, hidden)
                yield f"{prefix}.self_attn.v_proj.weight", (key, hidden)
                yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
                continue
            yield f"{prefix}.mamba.in_proj.weight", (inner + mixed + heads, hidden)
            yield f"{prefix}.mamba.conv1d.weight", (mixed, 1, config["mamba_d_conv"])
            yield f"{prefix}.mamba.conv1d.bias", (mixed,)
            yield f"{prefix}.mamba.dt_bias", (heads,)
            yield f"{prefix}.mamba.A_log", (heads,)
            yield f"{prefix}.mamba.D", (heads,)
            yield f"{prefix}.mamba.norm.weight", (inner,)
            yield f"{prefix}.mamba.out_proj.weight", (hidden, inner)

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        attention = 2 * config["layer_types"].count(_MIXING) * config["num_key_value_heads"] * config["head_dim"]
        state = config["mamba_n_heads"] * config["mamba_d_head"] * (config["mamba_d_state"] + config["mamba_d_conv"])
        num_states = config["layer_types"].count(_STATE_SPACE) * _NUM_STATES
        return 4 * int(attention + 2 * num_states * state // _NUM_TOKENS)


GRANITE_350M = StateSpaceShape(
    "granite-4-350m",
    "the shape of Granite 4's 350M-hybrid: 32 layers of 768, 4 of attention with 12 heads of 64 (4 for keys), 28 of "
    "Mamba 2 with 48 heads of 32 and states of 128, 2048 between, vocabulary 100,352, tied",
    {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100_352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "layer_types": [_MIXING if layer in (10, 13, 17, 27) else _STATE_SPACE for layer in range(32)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.246,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
)
