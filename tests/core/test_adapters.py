"""LoRA adapters in whole engines, compared with PEFT on Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock.contract.lora import LoRARequest
from penstock.engine.core import EngineCore
from support.adapters import VARIANTS, make_adapters, parts_of, request_of, with_adapter
from support.checkpoints import VOCAB_SIZE, oracle_logits, save_checkpoint, tiny_model
from support.engines import Result, add, finish, greedy, make_core, random_prompts

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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    with adapted(tmp_path_factory.mktemp("llama")) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llama: Adapted) -> list[tuple[list[int], list[torch.Tensor]]]:
    return [llama.expected(prompt, number) for prompt, number in zip(PROMPTS, ADAPTERS, strict=True)]


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"kv_cache_memory_bytes": 68_000},
        {"max_loras": 2},
        {"max_loras": 1, "max_cpu_loras": 3},
        {"async_scheduling": True},
    ],
    ids=["all-at-once", "chunked", "preempted", "two-slots", "one-slot", "async"],
)
def test_mixed_batches_give_the_tokens_and_log_probabilities_of_peft(
    llama: Adapted, expected: list[tuple[list[int], list[torch.Tensor]]], options: dict[str, Any]
) -> None:
    core = make_core(llama.folder, **{**OPTIONS, **options})
    results = run(core, llama)
    num_preemptions = core.scheduler.num_preemptions
    core.close()
    assert_same(results, expected)
    if "kv_cache_memory_bytes" in options:
        assert num_preemptions > 0


def test_requests_alone_have_the_bits_of_a_mixed_batch(llama: Adapted) -> None:
    core = make_core(llama.folder, **OPTIONS, enable_prefix_caching=False)
    together = run(core, llama)
    alone = [run(core, llama, [prompt], [number])[0] for prompt, number in zip(PROMPTS, ADAPTERS, strict=True)]
    core.close()
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == other.logprobs
