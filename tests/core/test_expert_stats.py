"""Tokens per expert and layer that an engine counts, compared with the routers of Transformers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.statistics.expert_load import sum_of_workers
from penstock.errors import LifecycleError, UnsupportedFeature
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import Result, greedy, make_core, random_prompts, run

PROMPTS = random_prompts((3, 40, 1, 17), VOCAB_SIZE)
NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_TOKENS = 3, 6, 2, 5
# Whole prompts in one step, so that the last layer computes the last token of each prompt and those after it.
OPTIONS = {"max_num_batched_tokens": 128, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return tiny_model("qwen3_moe", num_hidden_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K)


@pytest.fixture(scope="module")
def folder(oracle: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_moe")
    save_checkpoint(oracle, path)
    return path


def of_oracle(oracle: PreTrainedModel, results: list[Result]) -> dict[int, list[int]]:
    """Tokens per expert and layer for these prompts and their continuations, whose last token is not computed."""
    tokens = {layer: torch.zeros(NUM_EXPERTS, dtype=torch.int64) for layer in range(NUM_LAYERS)}
    for prompt, result in zip(PROMPTS, results, strict=True):
        sequence = torch.tensor([[*prompt, *result.tokens[:-1]]])
        with torch.no_grad():
            router_logits = oracle(sequence, output_router_logits=True).router_logits
        for layer, logits in enumerate(router_logits):
            begin = len(prompt) - 1 if layer == NUM_LAYERS - 1 else 0
            chosen = logits.view(-1, NUM_EXPERTS)[begin:].topk(TOP_K).indices.flatten()
            tokens[layer] += torch.bincount(chosen, minlength=NUM_EXPERTS)
    return {layer: counts.tolist() for layer, counts in tokens.items()}


def read(core: EngineCore) -> dict[int, list[int]]:
    return sum_of_workers(core.collective_rpc(RpcCall("get_expert_stats")))


def count(folder: Path, **options: Any) -> tuple[list[Result], dict[int, list[int]]]:
    """Results of the prompts, and the tokens per expert, with dummy steps before and after."""
    core = make_core(folder, **{**OPTIONS, **options})
    core.collective_rpc(RpcCall("start_expert_stats"))
    core.collective_rpc(RpcCall("execute_dummy_batch"))
    core.collective_rpc(RpcCall("measure_step_costs"))
    results = run(core, PROMPTS, greedy(NUM_TOKENS))
    core.collective_rpc(RpcCall("execute_dummy_batch"))
    tokens = read(core)
    core.close()
    return results, tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "enable_sp": True, "sp_min_token_num": 8}, marks=pytest.mark.slow),
    ],
    ids=lambda options: ", ".join(options),
)
def test_an_engine_counts_what_the_routers_of_transformers_choose(
    oracle: PreTrainedModel, folder: Path, options: dict[str, Any]
) -> None:
    results, tokens = count(folder, **options)
    assert tokens == of_oracle(oracle, results)


def test_counting_begins_with_its_start_and_anew_with_another_one(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    before = run(core, PROMPTS, greedy(NUM_TOKENS))
    with pytest.raises(LifecycleError, match="start_expert_stats must come first"):
        read(core)
    core.collective_rpc(RpcCall("start_expert_stats"))
    assert read(core) == {layer: [0] * NUM_EXPERTS for layer in range(NUM_LAYERS)}
    after = run(core, PROMPTS, greedy(NUM_TOKENS))
    assert [one.tokens for one in after] == [one.tokens for one in before]
    once = read(core)
    core.collective_rpc(RpcCall("reload_weights"))
    run(core, PROMPTS, greedy(NUM_TOKENS))
    assert read(core) == {layer: [2 * tokens for tokens in counts] for layer, counts in once.items()}
    core.collective_rpc(RpcCall("start_expert_stats"))
    assert not any(map(sum, read(core).values()))
    core.close()


def test_the_option_counts_from_the_start_on(oracle: PreTrainedModel, folder: Path) -> None:
    core = make_core(folder, **OPTIONS, expert_stats=True)
    assert read(core) == {layer: [0] * NUM_EXPERTS for layer in range(NUM_LAYERS)}
    results = run(core, PROMPTS, greedy(NUM_TOKENS))
    assert read(core) == of_oracle(oracle, results)
    core.close()


@pytest.mark.slow
def test_workers_that_replace_lost_ones_count_from_their_start_on(oracle: PreTrainedModel, folder: Path) -> None:
    core = make_core(folder, **OPTIONS, expert_stats=True, tensor_parallel_size=2)
    run(core, PROMPTS, greedy(NUM_TOKENS))
    lost = core._executor.process_ids[0]  # type: ignore[attr-defined]
    os.kill(lost, signal.SIGKILL)
    results = run(core, PROMPTS, greedy(NUM_TOKENS))
    assert read(core) == of_oracle(oracle, results)
    core.close()


@pytest.mark.slow
def test_a_model_without_native_experts_is_refused(folder: Path, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    for model, options in ((tmp_path, {}), (folder, {"model_impl": "transformers"})):
        core = make_core(model, **options)
        with pytest.raises(UnsupportedFeature, match="has no layers with experts that count their tokens"):
            core.collective_rpc(RpcCall("start_expert_stats"))
        core.close()
        with pytest.raises(UnsupportedFeature, match="expert_stats: .* has no layers with experts"):
            make_core(model, **options, expert_stats=True)
