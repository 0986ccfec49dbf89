"""The last stage of a pipeline guesses for all: the drafts are those of one worker, and so are the tokens."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock.contract import RpcCall, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import CheckpointError, UnsupportedArgument
from penstock.executor import MultiprocessExecutor
from support.arrangements import some_steps
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.draft_heads import HIDDEN, eagle3_weights, eagle_weights, random_weights, write_head, write_mimo
from support.engines import Result, finish, greedy, make_core, random_prompts, run

DRAWN: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
PROMPTS = random_prompts((5, 21, 1, 40, 13), VOCAB_SIZE, seed=3)
PARAMS = [
    greedy(20),
    SamplingParams(**DRAWN, seed=1, max_tokens=20, logprobs=2),
    SamplingParams(**DRAWN, seed=2, max_tokens=18, presence_penalty=0.5, repetition_penalty=1.2, top_k=9),
    greedy(16, prompt_logprobs=1),
    SamplingParams(**DRAWN, seed=3, max_tokens=12),
]
# How many drafts were made for each request, and which, step by step.
Drafts = list[dict[str, list[int]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets of 4 and of 2 layers, and drafters that know nothing, with and without parts of their own."""
    folder = tmp_path_factory.mktemp("models")
    tiny_checkpoint(folder / "target", num_hidden_layers=4)
    tiny_checkpoint(folder / "tied", "qwen3", num_hidden_layers=4, head_dim=16, tie_word_embeddings=True)
    tiny_checkpoint(folder / "draft_model", "qwen3", seed=7, head_dim=32, num_key_value_heads=2)
    write_head(folder / "eagle", eagle_weights())
    own = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (VOCAB_SIZE, HIDDEN))
    write_head(folder / "eagle with its own", {**eagle_weights(), **random_weights(own, seed=2)})
    # By default it reads what comes before layers 1 and 2 of four.
    write_head(folder / "eagle3", eagle3_weights(), draft_vocab_size=40)
    write_mimo(folder / "mimo")
    return folder


def drafting(models: Path, method: str, target: str, stages: tuple[int, ...], **options: Any) -> EngineCore:
    config: dict[str, Any] = {"method": method.split()[0], "num_speculative_tokens": 3, "adaptive": False}
    if method != "mtp":
        config["model"] = str(models / method)
    arrangement = {"pipeline_parallel_size": len(stages), "pipeline_layers": stages} if len(stages) > 1 else {}
    return make_core(
        models / target,
        **{
            "dtype": "float32",
            "max_model_len": 64,
            "num_threads": len(stages) * options.get("tensor_parallel_size", 1),
            "kv_cache_memory_bytes": "1MiB",
            "speculative_config": {**config, **options.pop("drafts", {})},
            **arrangement,
            **options,
        },
    )


def results_of(core: EngineCore) -> tuple[list[Result], Drafts]:
    drafts: Drafts = []
    schedule = core.scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        drafts.append(dict(output.scheduled_spec_decode_tokens))
        return output

    try:
        with patch.object(core.scheduler, "schedule", noted):
            return run(core, PROMPTS, PARAMS), drafts
    finally:
        core.close()


def tokens_of(results: list[Result]) -> list[list[int]]:
    assert [result.error for result in results] == [None] * len(results)
    return [result.tokens for result in results]


def assert_as_of_one_worker(
    models: Path, method: str, target: str, stages: tuple[int, ...], ranks: dict[str, Any], **options: Any
) -> None:
    """ranks: how those of a stage are arranged."""
    expected, right = results_of(drafting(models, method, target, (sum(stages),), **options))
    found, drafts = results_of(drafting(models, method, target, stages, **ranks, **options))
    assert tokens_of(found) == tokens_of(expected)
    # How many are made goes by measured times, if it goes by anything.
    assert drafts == right or options["drafts"]["adaptive"]
    assert any(drafts)


@pytest.mark.parametrize(
    ("method", "target", "stages"),
    [
        ("draft_model", "target", (1, 3)),
        ("eagle", "target", (2, 2)),
        ("eagle with its own", "target", (2, 2)),
        ("eagle", "tied", (2, 1, 1)),
        ("mtp", "mimo", (1, 1)),
        ("eagle3", "target", (1, 3)),
        ("eagle3", "target", (2, 1, 1)),
    ],
)
@pytest.mark.slow
def test_the_last_stage_guesses_for_all(models: Path, method: str, target: str, stages: tuple[int, ...]) -> None:
    assert_as_of_one_worker(models, method, target, stages, {}, async_scheduling=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        ({}, {"async_scheduling": True}),
        ({"tensor_parallel_size": 2}, {"async_scheduling": False}),
        ({"tensor_parallel_size": 2}, {"async_scheduling": True, "block_size": 4}),
        ({"tensor_parallel_size": 2, "enable_sp": True, "sp_min_token_num": 4}, {"async_scheduling": True}),
        ({}, {"async_scheduling": True, "max_num_batched_tokens": 9, "max_num_seqs": 3}),
        ({}, {"async_scheduling": True, "fast_paths": "off"}),
        ({}, {"async_scheduling": True, "drafts": {"adaptive": True}}),
        ({}, {"async_scheduling": False, "drafts": {"rejection_sample_method": "standard"}}),
        ({}, {"async_scheduling": False, "quantization": "int8"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_the_last_stage_guesses_for_all_in_every_arrangement(
    models: Path, method: str, ranks: dict[str, Any], options: dict[str, Any]
) -> None:
    if method == "eagle3" and "enable_sp" in ranks:
        with pytest.raises(UnsupportedArgument, match="it reads auxiliary hidden states of all tokens"):
            drafting(models, method, "target", (1, 3), **ranks, **options)
    else:
        assert_as_of_one_worker(models, method, "target", (1, 3), ranks, **options)


@pytest.mark.slow
def test_a_state_is_of_use_to_engines_whose_stages_have_the_same_parts(models: Path, tmp_path: Path) -> None:
    """The last one has the embedding for a head that has none of its own."""
    expected, _ = results_of(drafting(models, "eagle", "target", (4,)))
    for method in ("eagle", "draft_model"):
        core = drafting(models, method, "target", (2, 2))
        core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / method),)))
        core.close()
        found, _ = results_of(drafting(models, method, str(tmp_path / method), (2, 2), load_format="sharded_state"))
        assert tokens_of(found) == tokens_of(expected)
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens\.weight.* save its state anew"):
        drafting(models, "eagle", str(tmp_path / "draft_model"), (2, 2), load_format="sharded_state")


@pytest.mark.slow
def test_requests_go_on_with_their_tokens_when_the_stage_that_guesses_is_lost(models: Path) -> None:
    expected, _ = results_of(drafting(models, "eagle3", "target", (4,)))
    core = drafting(models, "eagle3", "target", (2, 2))
    results = some_steps(core, PROMPTS, PARAMS)
    executor = core._executor
    assert isinstance(executor, MultiprocessExecutor)
    os.kill(executor.process_ids[1], signal.SIGKILL)
    finish(core, results)
    core.close()
    assert tokens_of([results[f"r{index}"] for index in range(len(PROMPTS))]) == tokens_of(expected)
