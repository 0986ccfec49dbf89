"""Prompts and models for engines whose blocks of the KV cache are kept elsewhere, and what they answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.engine.core.engine_core import EngineCore
from penstock.features.kv_files.files import ABOUT
from support.engines import Result, greedy, random_prompts, run

VOCAB = 97
PROMPTS = random_prompts([70, 100, 33, 7], vocab_size=VOCAB)
# Family and options by what is in a block.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "windows": ("gemma2", {}),
    "latents": ("deepseek_v3", {}),
    "states": ("lfm2", {}),
    "states-of-all-borders": ("qwen3_5", {"mamba_cache_mode": "all"}),
    "two-mixers": ("falcon_h1", {}),
    "int8-cache": ("llama", {"kv_cache_dtype": "int8"}),
    "bfloat16-cache": ("qwen2", {"kv_cache_dtype": "bfloat16"}),
    "drafts": ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    "int8": ("llama", {"quantization": "int8"}),
    "asynchronous": ("llama", {"async_scheduling": True}),
}


def files(folder: Path) -> list[Path]:
    """Files of the blocks below a folder."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ABOUT]


def branching_prompts(choose: random.Random, seed: int) -> list[list[int]]:
    """Twelve prompts, each one of three beginnings and an end of its own."""
    stems = random_prompts([40, 64, 50], vocab_size=VOCAB, seed=seed)
    return [
        [*choose.choice(stems), *random_prompts([choose.randint(1, 40)], vocab_size=VOCAB, seed=seed * 100 + index)[0]]
        for index in range(12)
    ]


def answers(core: EngineCore, prompts: Sequence[Sequence[int]] = PROMPTS, max_tokens: int = 12) -> list[Result]:
    return run(core, prompts, greedy(max_tokens, logprobs=2))


def same(one: Sequence[Result], other: Sequence[Result]) -> bool:
    return [(result.tokens, result.logprobs) for result in one] == [
        (result.tokens, result.logprobs) for result in other
    ]


def counter(core: EngineCore, name: str) -> int:
    return core.stats().counters[name]
