"""Workers that have layers of their own give the tokens and log-probabilities of one that has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.contract import SamplingParams
from penstock.engine.core import EngineCore
from support.checkpoints import tiny_checkpoint
from support.engines import Result, greedy, make_core, random_prompts, run

VOCAB_SIZE = 96
# Several chunks of one prompt, a prompt that begins as another does, and short ones.
PROMPTS = random_prompts((5, 21, 40, 90), VOCAB_SIZE, seed=4)
PROMPTS += [[*PROMPTS[2], 7, 8], PROMPTS[1][:16]]
# A block: keys and values of 16 positions and two heads, of a layer.
LAYER_BYTES = 2 * 16 * 2 * 16 * 4
LAYERS = 6


def sampled(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=16, ignore_eos=True, **fields)


PARAMS = [
    greedy(16, logprobs=3),
    sampled(1, top_k=20, logprobs=2),
    sampled(2, top_p=0.8, presence_penalty=0.5, prompt_logprobs=2),
    greedy(16),
    sampled(3, min_p=0.05, frequency_penalty=0.3, logit_bias={5: 2.0}),
    greedy(16, repetition_penalty=1.2, prompt_logprobs=1),
]


def make(folder: Path, stages: tuple[int, ...], ranks: int = 1, **options: Any) -> EngineCore:
    """With room for a few of the requests, so that others are preempted: 13 blocks, whoever has their layers."""
    room = 13 * LAYER_BYTES * max(stages) // ranks
    arrangement = {"pipeline_parallel_size": len(stages), "tensor_parallel_size": ranks}
    if len(stages) > 1:
        arrangement["pipeline_layers"] = stages  # type: ignore[assignment]
    return make_core(
        folder,
        **{
            **arrangement,
            "num_threads": len(stages) * ranks,
            "kv_cache_memory_bytes": room,
            "max_model_len": 128,
            "max_num_batched_tokens": 64,
            **options,
        },
    )


def assert_same(found: list[Result], expected: list[Result]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.tokens, ours.finish_reason, ours.error) == (theirs.tokens, theirs.finish_reason, theirs.error)
        assert len(ours.logprobs) == len(theirs.logprobs)
        for row, other in zip(
            [*ours.logprobs, *(ours.prompt_logprobs or [])],
            [*theirs.logprobs, *(theirs.prompt_logprobs or [])],
            strict=True,
        ):
            assert row == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "stages", "ranks", "options"),
    [
        ("llama", (3, 3), 1, {"async_scheduling": False}),
        ("llama", (1, 3, 2), 1, {"async_scheduling": True}),
        ("qwen3", (3, 3), 2, {}),
        ("gemma3", (2, 4), 1, {}),
    ],
)
def test_stages_give_the_tokens_of_one_worker(
    family: str, stages: tuple[int, ...], ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, family, vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=LAYERS)
    results = []
    for arrangement, size in (((LAYERS,), 1), (stages, ranks)):
        core = make(tmp_path, arrangement, size, **options)
        try:
            first = run(core, PROMPTS, PARAMS)
            again = run(core, PROMPTS, PARAMS)
        finally:
            core.close()
        if family != "gemma3":
            assert sum(result.num_preemptions for result in first) > 0
        assert sum(result.num_cached_tokens for result in again) > 0
        results.append(first + again)
    assert_same(results[1], results[0])
