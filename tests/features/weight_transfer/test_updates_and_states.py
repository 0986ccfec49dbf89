"""Updates of engines that sleep or have no weights, and what is known of weights that came in another way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import CheckpointError, EngineAsleep, LifecycleError
from support.engines import add, greedy, make_core, random_prompts, run
from support.sleepers import call, put_to_sleep, state_of

PROMPTS = random_prompts([5, 40], 97)
pytestmark = pytest.mark.one_path(reason="both paths read the same memory")


@pytest.fixture
def core(folders: tuple[Path, Path]) -> Iterator[EngineCore]:
    core = make_core(folders[0], weight_transfer_config={"backend": "files"})
    yield core
    core.close()


def tokens(core: EngineCore) -> list[list[int]]:
    return [result.tokens for result in run(core, PROMPTS, greedy(6))]


def update(core: EngineCore, folder: Path, *, is_atomic: bool | None = None, version: int | None = None) -> None:
    call(core, "start_weight_update", True, is_atomic)
    call(core, "update_weights", {"path": str(folder)})
    call(core, "finish_weight_update", version)


def lose_worker(core: EngineCore) -> None:
    def fail_next_step(worker: Any) -> None:
        def fail(output: object) -> None:
            raise RuntimeError("the worker is gone")

        worker.execute_model = fail

    core.collective_rpc(RpcCall(fail_next_step))


def test_updates_need_weights_that_are_awake(
    core: EngineCore, folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    put_to_sleep(core)
    with pytest.raises(EngineAsleep, match="start_weight_update needs weights in memory"):
        call(core, "start_weight_update")
    call(core, "wake_up")
    call(core, "start_weight_update")
    call(core, "update_weights", {"path": str(folders[1])})
    put_to_sleep(core)
    for method, args in (("update_weights", ({"path": str(folders[0])},)), ("finish_weight_update", ())):
        with pytest.raises(EngineAsleep, match=f"{method} needs weights"):
            call(core, method, *args)
    call(core, "wake_up")
    call(core, "finish_weight_update")
    assert tokens(core) == expected[1]


def test_weights_that_are_undefined_stay_so_after_an_update_that_replaced_none(
    core: EngineCore, folders: tuple[Path, Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    content = load_file(folders[1] / "model.safetensors")
    del content["model.norm.weight"]
    save_file(content, tmp_path / "part.safetensors")
    put_to_sleep(core, 2)
    call(core, "wake_up")
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        update(core, tmp_path / "part.safetensors", is_atomic=True)
    assert "level 2" in call(core, "weight_update_status").why_undefined
    assert state_of(core).undefined
    with pytest.raises(LifecycleError, match="weights are undefined"):
        call(core, "save_sharded_state", str(tmp_path / "saved"))
    update(core, folders[1])
    assert tokens(core) == expected[1]


def test_an_update_with_the_version_of_the_one_before_clears_the_prefix_cache(
    core: EngineCore, folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    for number in (1, 0, 1):
        update(core, folders[number], is_atomic=True, version=7)
        assert tokens(core) == expected[number]


def test_kept_weights_are_not_those_of_before_tensors_in_another_format(
    folders: tuple[Path, Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    core = make_core(
        folders[0], weight_transfer_config={"backend": "files", "recovery": "keep", "recovery_dir": str(tmp_path)}
    )
    update(core, folders[1])
    assert call(core, "weight_update_status").folder is not None
    core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / "state"),)))
    call(core, "start_weight_update", False)
    call(core, "update_weights", {"paths": [str(path) for path in (tmp_path / "state").glob("*.safetensors")]})
    call(core, "finish_weight_update")
    assert tokens(core) == expected[1]
    assert call(core, "weight_update_status").folder is None
    lose_worker(core)
    add(core, "waits", PROMPTS[0], greedy(2))
    for _ in range(5):
        assert core.step() == []
    assert "weights of version 2 with it" in call(core, "weight_update_status").why_undefined
    core.close()
