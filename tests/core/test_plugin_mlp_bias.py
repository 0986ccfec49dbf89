"""A bias per request inside the MLP as a plugin of one file: its rows reach the MLP in the forward context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.plugins import CIRCUMSTANCES, assert_equal, install_plugin, mlp_bias, write_checkpoint
from penstock.attention import NO_CONTEXT
from penstock.contract import Parts, RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.worker.changes_model import keeps_model
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE
from support.engines import Result, add, finish, greedy, make_core, random_prompts
from support.padded_attention import PaddedBackend, use_graphs

PROMPTS = random_prompts((5, 37, 1, 40, 13, 22), VOCAB_SIZE, seed=3)
BIASES = [1, 0, 2, 3, 0, 1]
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mlp_bias.register()
    return write_checkpoint(tmp_path_factory.mktemp("biased"), mlp_bias.ARCHITECTURE)


def run(
    core: EngineCore, prompts: Sequence[Sequence[int]], bias_ids: Sequence[int], logprobs: int | None = 2
) -> list[Result]:
    for index, (prompt, bias_id) in enumerate(zip(prompts, bias_ids, strict=True)):
        parts = Parts.of([mlp_bias.BiasPart(bias_id=bias_id)]) if bias_id else None
        add(core, f"r{index}", prompt, greedy(20, logprobs=logprobs), parts=parts)
    results: dict[str, Result] = {}
    finish(core, results)
    return [results[f"r{index}"] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Result]:
    """Each request by itself, layer by layer."""
    core = make_core(folder, **OPTIONS, fast_paths="off", enable_prefix_caching=False)
    try:
        return [run(core, [prompt], [one])[0] for prompt, one in zip(PROMPTS, BIASES, strict=True)]
    finally:
        core.close()


@pytest.mark.parametrize("options", CIRCUMSTANCES, ids=str)
def test_mixed_batches_have_the_bits_of_requests_alone(
    folder: Path, alone: list[Result], options: dict[str, Any]
) -> None:
    core = make_core(folder, **OPTIONS, **options)
    assert_equal(run(core, PROMPTS, BIASES), alone)
    core.close()


def test_the_bias_is_added_to_the_activated_features(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    (model,) = core.collective_rpc(RpcCall("get_model"))
    mlp, hidden_TD, rows_T = model.model.layers[1].mlp, torch.randn(3, 64), torch.tensor([2, 0, 3], dtype=torch.int32)
    plain_TI = mlp.activated(hidden_TD, NO_CONTEXT)
    found_TI = mlp.activated(hidden_TD, NO_CONTEXT.with_inputs({mlp_bias.INPUT: rows_T}))
    assert torch.equal(found_TI, plain_TI + mlp.biases_BI[rows_T.long()])
    assert not torch.equal(found_TI[0], plain_TI[0])
    core.close()


class BiasedWorker(Worker):
    @keeps_model
    def segments(self) -> list[int]:
        programs = self.runner.execution.programs._recorded
        return [0 if found is None else found.num_segments for found in programs.values()]


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_steps_stay_one_call(folder: Path, alone: list[Result]) -> None:
    core = make_core(folder, **OPTIONS, worker_cls=f"{__name__}.BiasedWorker")
    assert_equal(run(core, PROMPTS, BIASES), alone)
    (segments,) = core.collective_rpc(RpcCall("segments"))
    assert set(segments) == {1}
    core.close()


@pytest.mark.one_path(reason="runs engines with and without fast paths itself")
@pytest.mark.parametrize("logprobs", [None, 2], ids=["greedy tokens", "log-probabilities"])
def test_graphs_have_the_bits_of_steps_layer_by_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    device = use_graphs(monkeypatch)
    results = []
    for fast_paths in ("auto", "off"):
        core = make_core(folder, **OPTIONS, attention_backend=PaddedBackend.name, fast_paths=fast_paths)
        results.append(run(core, PROMPTS, BIASES, logprobs))
        core.close()
    assert_equal(*results)
    assert device.refusals == []
    assert device.num_replays > 5


@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_group_add_their_own_features(
    folder: Path, alone: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, "mlp_bias")
    core = make_core(folder, **OPTIONS, tensor_parallel_size=2)
    for result, expected in zip(run(core, PROMPTS, BIASES), alone, strict=True):
        for row, other in zip(result.logprobs[:1], expected.logprobs[:1], strict=True):
            assert max(abs(row[token] - other[token]) for token in row.keys() & other.keys()) < 1e-3
    core.close()
