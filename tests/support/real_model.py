"""SmolLM2-135M-Instruct from its published GGUF file, for tests in `tests/real`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.checkpoints.published import PUBLISHED

MODEL = PUBLISHED["smollm2"]
MARKS = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_fetched, reason="smollm2 is not in the cache folder: `make real` fetches it"),
]
PROMPTS = [
    "The capital of France is",
    "In 1984, 12345 people",
    "def fib(n):\n",
    "Der Hund läuft über die Straße. 你好",
    "1, 2, 3, 4,",
]
NUM_TOKENS = 32
_GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Values of the file in float32, without rounding.
EXACT = {"quantization": "none", "dtype": "float32"}


def greedy(llm: LLM, prompts: Sequence[str] = PROMPTS, **options: Any) -> list[list[int]]:
    """Tokens of prompts."""
    outputs = llm.generate(list(prompts), _GREEDY, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]
