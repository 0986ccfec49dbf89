"""Snapshots of recurrent states are of the present weights: requests find none of others, nor of dropped memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.contract import RpcCall
from penstock.contract.memory_tags import WEIGHTS
from penstock.engine.core.engine_core import EngineCore
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run
from support.sleepers import call, put_to_sleep

PROMPTS = random_prompts([5, 40], VOCAB_SIZE)
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 96, "kv_cache_memory_bytes": 8 << 20}
NONE, FOUND = [0, 0], [4, 36]


def said(core: EngineCore) -> tuple[list[Any], list[int]]:
    """Tokens and log-probabilities, and the lengths of the prefix-cache hits."""
    results = run(core, PROMPTS, greedy(8, logprobs=2))
    return [(one.tokens, one.logprobs) for one in results], [one.num_cached_tokens for one in results]


def update(core: EngineCore, folder: Path) -> None:
    call(core, "start_weight_update")
    call(core, "update_weights", {"path": str(folder)})
    call(core, "finish_weight_update")


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "granitemoehybrid", "mamba"])
@pytest.mark.one_case_quick
def test_snapshots_of_other_weights_and_of_dropped_memory_are_not_found(family: str, tmp_path: Path) -> None:
    folders = tmp_path / "old", tmp_path / "new"
    expected = []
    for seed, folder in enumerate(folders):
        tiny_checkpoint(folder, family, seed=seed)
        core = make_core(folder, **OPTIONS)
        expected.append(said(core)[0])
        core.close()
    old, new = expected
    assert old != new

    core = make_core(folders[0], **OPTIONS, weight_transfer_config={"backend": "files"})
    assert [said(core), said(core)] == [(old, NONE), (old, FOUND)]
    update(core, folders[1])
    assert [said(core), said(core)] == [(new, NONE), (new, FOUND)]
    put_to_sleep(core, 1, "keep", (WEIGHTS,))
    call(core, "wake_up")
    assert said(core) == (new, FOUND)
    put_to_sleep(core)
    call(core, "wake_up")
    assert [said(core), said(core)] == [(new, NONE), (new, FOUND)]
    put_to_sleep(core, 2)
    call(core, "wake_up")
    update(core, folders[0])
    assert [said(core), said(core)] == [(old, NONE), (old, FOUND)]
    core.collective_rpc(RpcCall("reload_weights", (str(folders[1]),)))
    assert [said(core), said(core)] == [(new, NONE), (new, FOUND)]
    core.close()
