"""Whole engines that keep drafts by another rule than being drawn: by the rejection rule, or by a rate."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import SamplingParams, SchedulerOutput
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run

NGRAM: dict[str, Any] = {
    "method": "ngram",
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "num_speculative_tokens": 3,
    "adaptive": False,
}
PROMPTS = [prompt * 2 for prompt in random_prompts((5, 21, 1, 40, 13, 8), VOCAB_SIZE, seed=3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path)
    return path


def joint_tokens(folder: Path, method: str, num_requests: int, first_seed: int) -> Counter[tuple[int, ...]]:
    """Number of occurrences of each output after one prompt, over many seeds."""
    core = make_core(
        folder,
        dtype="float32",
        speculative_config={**NGRAM, "rejection_sample_method": method},
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        kv_cache_memory_bytes=32 << 20,
    )
    params = [
        SamplingParams(seed=first_seed + seed, max_tokens=4, ignore_eos=True, allowed_token_ids=[5, 6, 7])
        for seed in range(num_requests)
    ]
    results = run(core, [[5, 6, 7] * 6] * num_requests, params)
    core.close()
    return Counter(tuple(result.tokens) for result in results)


def test_the_standard_rule_leaves_the_distribution_of_texts(folder: Path) -> None:
    num = 3000
    exact, standard = (joint_tokens(folder, method, num, seed) for method, seed in (("exact", 0), ("standard", 10**6)))
    cells = [key for key in exact | standard if exact[key] + standard[key] >= 10]
    statistic = sum((exact[key] - standard[key]) ** 2 / (exact[key] + standard[key]) for key in cells)
    assert len(cells) > 20
    # Mean and variance of chi-square with so many cells.
    assert statistic < len(cells) + 4.5 * (2 * len(cells)) ** 0.5


def test_the_standard_rule_does_not_change_greedy_texts(folder: Path) -> None:
    found = []
    for config in (None, {**NGRAM, "rejection_sample_method": "standard"}):
        core = make_core(folder, dtype="float32", speculative_config=config)
        found.append([result.tokens for result in run(core, PROMPTS, greedy(30))])
        core.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize(
    ("acceptance", "mean_length"),
    [
        ({"synthetic_acceptance_length": 2.5}, 2.5),
        ({"synthetic_acceptance_length": 4.0}, 4.0),
        ({"synthetic_acceptance_length": 1.0}, 1.0),
        ({"synthetic_acceptance_rates": [0.9, 0.5, 0.1]}, 2.5),
    ],
    ids=str,
)
@pytest.mark.each_value_quick
def test_a_synthetic_acceptance_is_what_was_asked_for(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    acceptance: dict[str, Any],
    mean_length: float,
    async_scheduling: bool,
) -> None:
    num_decodes = 0
    execute = Worker.execute_model

    def count(worker: Worker, output: SchedulerOutput) -> None:
        nonlocal num_decodes
        num_decodes += len(output.scheduled_spec_decode_tokens)
        execute(worker, output)

    monkeypatch.setattr(Worker, "execute_model", count)
    config = {**NGRAM, "rejection_sample_method": "synthetic", **acceptance}
    core = make_core(folder, speculative_config=config, async_scheduling=async_scheduling, max_num_batched_tokens=256)
    params = [SamplingParams(temperature=index % 2, seed=index, max_tokens=80, ignore_eos=True) for index in range(12)]
    results = run(core, PROMPTS[:3] * 4, params)
    core.close()
    assert [len(result.tokens) for result in results] == [80] * 12
    assert sum(len(result.tokens) - 1 for result in results) / num_decodes == pytest.approx(mean_length, rel=0.1)
