"""Tiny models with LoRA adapters of PEFT, and PEFT's results of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from penstock.engine.core.engine_core import EngineCore
from penstock.features.lora.request import LoRARequest
from support.adapters import VARIANTS, make_adapters, parts_of, request_of, with_adapter
from support.checkpoints import VOCAB_SIZE, oracle_logits, save_checkpoint, tiny_model
from support.constraints import END, allowed_tokens, matcher_for
from support.engines import Result, add, finish, greedy, random_prompts

NUM_TOKENS = 10
PROMPTS = random_prompts((5, 37, 1, 40, 13, 22, 9, 30, 17), VOCAB_SIZE, seed=3)
# Requests of 8 adapters and of none.
ADAPTERS = [1, 0, 2, 3, 4, 5, 6, 7, 8]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "enable_lora": True,
    "max_loras": 8,
    "max_lora_rank": 16,
}


@dataclass
class Adapted:
    """A model with its adapters, and PEFT's results: greedy tokens, and all log-probabilities of each."""

    folder: Path
    model: PreTrainedModel
    requests: list[LoRARequest | None]

    def expected(self, prompt: Sequence[int], number: int) -> tuple[list[int], list[torch.Tensor]]:
        request = self.requests[number]
        model = self.model if request is None else with_adapter(self.model, Path(request.lora_path))
        tokens, rows = list(prompt), []
        for _ in range(NUM_TOKENS):
            rows.append(oracle_logits(model, tokens)[-1].log_softmax(-1))
            tokens.append(int(rows[-1].argmax()))
        if request is not None:
            model.unload()
        return tokens[len(prompt) :], rows


@contextmanager
def adapted(
    folder: Path, family: str = "llama", variants: Sequence[dict[str, Any]] = VARIANTS, **options: Any
) -> Iterator[Adapted]:
    model = tiny_model(family, **options)
    save_checkpoint(model, folder / "model")
    folders = make_adapters(model, folder, variants)
    yield Adapted(folder / "model", model, [None, *(request_of(n + 1, path) for n, path in enumerate(folders))])


def run(
    core: EngineCore, model: Adapted, prompts: Sequence[Sequence[int]] = PROMPTS, adapters: Sequence[int] = ADAPTERS
) -> list[Result]:
    for index, (prompt, number) in enumerate(zip(prompts, adapters, strict=True)):
        add(core, f"r{index}", prompt, greedy(NUM_TOKENS, logprobs=2), parts=parts_of(model.requests[number]))
    results: dict[str, Result] = {}
    finish(core, results)
    return [results[f"r{index}"] for index in range(len(prompts))]


def assert_same(results: Sequence[Result], expected: Sequence[tuple[list[int], list[torch.Tensor]]]) -> None:
    for result, (tokens, rows) in zip(results, expected, strict=True):
        assert result.error is None
        assert result.tokens == tokens
        for logprobs, row in zip(result.logprobs, rows, strict=True):
            for token, logprob in logprobs.items():
                assert abs(logprob - float(row[token])) < 1e-4


def masked_greedy(model: Any, prompt: Sequence[int], grammar: dict[str, Any]) -> list[int]:
    """Greedy tokens of a model with the demo's tokenizer, of those that a grammar allows."""
    matcher, tokens = matcher_for(**grammar), list(prompt)
    while tokens[-1] != END:
        allowed = allowed_tokens(matcher)
        logits = oracle_logits(model, tokens)[-1]
        tokens.append(max(allowed, key=lambda token: float(logits[token])))
        if tokens[-1] != END:
            assert matcher.accept(tokens[-1:]) == 1
    return tokens[len(prompt) :]


def in_memory(number: int, folder: Path, **fields: Any) -> LoRARequest:
    """The adapter of a folder as tensors."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    return LoRARequest(f"adapter{number}", number, tensors=tensors, peft_config=config, **fields)
