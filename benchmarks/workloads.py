"""The workloads that all engines are given: token ids in, fixed numbers of tokens out, greedy."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB_SIZE = 32_000
# A Llama of about 60 million parameters.
LLAMA_60M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Workload:
    """prompts: token ids. num_outputs: tokens to generate for each. unit: what the figure counts per second."""

    name: str
    title: str
    prompts: list[list[int]]
    num_outputs: list[int]
    unit: str

    @property
    def num_units(self) -> int:
        """Input tokens for a prefill workload, else output tokens."""
        return sum(map(len, self.prompts)) if self.unit == "input tok/s" else sum(self.num_outputs)


def make_workloads(seed: int = 0, *, vocab_size: int = VOCAB_SIZE, draw: int = 0) -> list[Workload]:
    """Decode, throughput, prefill and shared prefix; equal for equal arguments.

    draw: prompts of the same lengths but other tokens, which no engine has in a cache of prefixes.
    """
    rng = random.Random(seed)
    lengths = [rng.randint(16, 256) for _ in range(32)]
    outputs = [rng.randint(16, 128) for _ in range(32)]
    tokens_rng = rng if draw == 0 else random.Random(f"{seed}, draw {draw}")

    def tokens(count: int) -> list[int]:
        return [tokens_rng.randrange(10, vocab_size) for _ in range(count)]

    shared = tokens(384)
    return [
        Workload("decode", "1 request, 32 in, 128 out", [tokens(32)], [128], "output tok/s"),
        Workload(
            "throughput",
            "32 requests at once, 16-256 in, 16-128 out",
            [tokens(length) for length in lengths],
            outputs,
            "output tok/s",
        ),
        Workload("prefill", "8 requests, 512 in, 1 out", [tokens(512) for _ in range(8)], [1] * 8, "input tok/s"),
        Workload(
            "shared prefix",
            "32 requests, 384 shared + 16 own in, 32 out",
            [shared + tokens(16) for _ in range(32)],
            [32] * 32,
            "output tok/s",
        ),
    ]


def write_model(folder: Path) -> Path:
    """A random-weight checkpoint of LLAMA_60M; the same weights every time."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_60M))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.02 if len(shape) > 1 else torch.ones(shape)
        for name, shape in _shapes().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, middle = 512, 1536
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, hidden),
        "lm_head.weight": (VOCAB_SIZE, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(8):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (hidden // 2, hidden),
            f"{prefix}.self_attn.v_proj.weight": (hidden // 2, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (middle, hidden),
            f"{prefix}.mlp.up_proj.weight": (middle, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, middle),
        }
    return shapes
