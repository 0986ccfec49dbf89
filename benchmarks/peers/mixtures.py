"""Mixtures of experts for the comparison: published shapes with fewer layers and a smaller vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.hybrids import GRANITE_350M, LFM2_350M
from benchmarks.peers.shapes import SHAPES, ModelShape

_EXPERTS = ".experts."


@dataclass(frozen=True)
class MixtureShape(ModelShape):
    """A mixture: `num_layer_weights` counts the weights that a token multiplies by, of its own experts only."""

    @property
    def num_layer_weights(self) -> int:
        active = self.config["num_experts_per_tok"] / self.num_experts
        matrices = {name: size for name, size in self.weights() if len(size) > 1 and ".layers." in name}
        return sum(round(math.prod(size) * (active if _EXPERTS in name else 1)) for name, size in matrices.items())

    @property
    def num_experts(self) -> int:
        config = self.config
        return int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])

    def _more_weights(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        weights = _gpt_oss_experts if self.config["model_type"] == "gpt_oss" else _qwen3_experts
        return weights(prefix, self.config, self.num_experts)


def _qwen3_experts(prefix: str, config: dict[str, Any], num_experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, middle = config["hidden_size"], config["moe_intermediate_size"]
    yield f"{prefix}.mlp.gate.weight", (num_experts, hidden)
    for expert in range(num_experts):
        yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (middle, hidden)
        yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (middle, hidden)
        yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, middle)


def _gpt_oss_experts(prefix: str, config: dict[str, Any], num_experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All experts of a layer in one tensor, [inputs, outputs] each; outputs of gate and up alternate."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    yield f"{prefix}.self_attn.sinks", (config["num_attention_heads"],)
    yield f"{prefix}.mlp.router.weight", (num_experts, hidden)
    yield f"{prefix}.mlp.router.bias", (num_experts,)
    yield f"{prefix}.mlp.experts.gate_up_proj", (num_experts, hidden, 2 * middle)
    yield f"{prefix}.mlp.experts.gate_up_proj_bias", (num_experts, 2 * middle)
    yield f"{prefix}.mlp.experts.down_proj", (num_experts, middle, hidden)
    yield f"{prefix}.mlp.experts.down_proj_bias", (num_experts, hidden)


_COMMON = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "vocab_size": 32_000,
}
_QWEN3 = MixtureShape(
    "qwen3-30b-a3b-cut",
    "the shape of Qwen3-30B-A3B with 2 layers of 48 and a vocabulary of 32,000: 2048, 32 heads of 128 (4 for keys), "
    "128 experts of 768, 8 active",
    {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
)
_GPT_OSS = MixtureShape(
    "gpt-oss-20b-cut",
    "the shape of gpt-oss-20b with 2 layers of 24 and a vocabulary of 32,000: 2880, 64 heads of 64 (8 for keys), "
    "32 experts of 2880, 4 active, in bfloat16",
    {
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "max_position_embeddings": 131_072,
    },
)


def _tiny(shape: MixtureShape, **sizes: int) -> MixtureShape:
    """Cut a shape to what runs in seconds, to try a run out."""
    name = shape.name.replace("-cut", "-tiny")
    return replace(shape, name=name, title=f"{name}, to try out", config={**shape.config, **sizes})


_MIXTURES = (
    _QWEN3,
    _GPT_OSS,
    _tiny(_QWEN3, hidden_size=256, moe_intermediate_size=64, num_experts=16, num_attention_heads=4),
    _tiny(_GPT_OSS, hidden_size=256, intermediate_size=128, num_local_experts=8, num_attention_heads=8),
)
ALL_SHAPES: dict[str, ModelShape] = SHAPES | {shape.name: shape for shape in (*_MIXTURES, LFM2_350M, GRANITE_350M)}
