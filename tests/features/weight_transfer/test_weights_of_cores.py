"""Requests of a core whose weights are undefined, and of one whose workers are lost after an update."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import CheckpointError, LifecycleError, WeightTransferFailed
from penstock.features.weight_transfer.state import RankStatus
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run

PROMPTS = random_prompts([5, 21], 97)


def tokens(core: EngineCore) -> list[list[int]]:
    return [result.tokens for result in run(core, PROMPTS, greedy(10))]


def call(core: EngineCore, method: str, *args: Any) -> RankStatus:
    status: RankStatus = core.collective_rpc(RpcCall(method, args))[0]
    return status


def update(core: EngineCore, folder: Path, *, is_finished: bool = True) -> None:
    call(core, "start_weight_update")
    call(core, "update_weights", {"path": str(folder)})
    if is_finished:
        call(core, "finish_weight_update")


def with_trainer(folder: Path, **transfer: Any) -> EngineCore:
    return make_core(folder, weight_transfer_config={"backend": "files", **transfer})


def _fail_next_step(worker: Any) -> None:
    def fail(output: object) -> None:
        raise RuntimeError("the worker is gone")

    worker.execute_model = fail


def test_requests_wait_while_weights_are_undefined_and_go_on_with_the_new_ones(
    folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    core = with_trainer(folders[0])
    results = {f"r{index}": Result() for index in range(len(PROMPTS))}
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt, greedy(20))
    for _ in range(4):
        for output in core.step():
            results[output.req_id].take(output)
    known = {req_id: len(result.tokens) for req_id, result in results.items()}
    update(core, folders[1], is_finished=False)
    for _ in range(10):
        assert core.step() == []
    assert core.scheduler.num_running == 0
    call(core, "finish_weight_update")
    finish(core, results)
    assert all(len(result.tokens) == 20 > known[req_id] for req_id, result in results.items())
    assert tokens(core) == expected[1]
    core.close()


def test_a_failed_update_is_ended_by_the_next_one(
    folders: tuple[Path, Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    content = load_file(folders[1] / "model.safetensors")
    del content["model.norm.weight"]
    save_file(content, tmp_path / "part.safetensors")
    core = with_trainer(folders[0])
    call(core, "start_weight_update")
    call(core, "update_weights", {"paths": [str(tmp_path / "part.safetensors")]})
    with pytest.raises(CheckpointError, match=r"1 missing: model\.norm\.weight"):
        call(core, "finish_weight_update")
    assert "replaced 20 tensors" in str(call(core, "weight_update_status").why_undefined)
    add(core, "waits", PROMPTS[0], greedy(4))
    assert core.step() == []
    core.abort_requests(["waits"])
    update(core, folders[1])
    assert tokens(core) == expected[1]
    core.close()


def test_a_worker_that_is_replaced_has_the_kept_weights(
    folders: tuple[Path, Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    core = with_trainer(folders[0], recovery="keep", recovery_dir=str(tmp_path))
    core.collective_rpc(RpcCall(_fail_next_step))
    assert tokens(core) == expected[0]
    for number in (1, 0, 1):
        update(core, folders[number])
    assert len(list(tmp_path.glob("engine-0/version-*"))) == 1
    update(core, folders[0], is_finished=False)
    core.collective_rpc(RpcCall(_fail_next_step))
    call(core, "finish_weight_update")
    core.collective_rpc(RpcCall(_fail_next_step))
    assert tokens(core) == expected[0]
    assert call(core, "weight_update_status").version == 4
    core.close()


def test_without_kept_weights_requests_wait_for_the_next_update(
    folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    core = with_trainer(folders[0])
    update(core, folders[1])
    core.collective_rpc(RpcCall(_fail_next_step))
    results = {"r": Result()}
    add(core, "r", PROMPTS[0], greedy(10))
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert core.step() == []
    assert "weights of version 1 with it" in str(call(core, "weight_update_status").why_undefined)
    update(core, folders[1])
    finish(core, results)
    assert results["r"].tokens == expected[1][0]
    core.close()


@pytest.mark.parametrize("has_trainer", [False, True])
def test_requests_wait_until_all_tensors_of_load_weights_have_come(
    folders: tuple[Path, Path], expected: list[list[list[int]]], has_trainer: bool
) -> None:
    core = with_trainer(folders[0]) if has_trainer else make_core(folders[0])
    results = {"r": Result()}
    add(core, "r", PROMPTS[0], greedy(20))
    for _ in range(4):
        for output in core.step():
            results[output.req_id].take(output)
    known = len(results["r"].tokens)
    items = list(load_file(folders[1] / "model.safetensors").items())
    load(core, items[:7])
    for _ in range(10):
        assert core.step() == []
    assert (core.scheduler.num_running, core.stats().state.name) == (0, "weights undefined")
    load(core, items[7:])
    assert core.stats().state.is_ready
    finish(core, results)
    assert len(results["r"].tokens) == 20 > known > 0
    assert tokens(core) == expected[1]
    core.close()


@pytest.mark.parametrize("has_trainer", [False, True])
def test_weights_that_are_not_kept_are_never_replaced_by_older_ones(
    folders: tuple[Path, Path], expected: list[list[list[int]]], has_trainer: bool
) -> None:
    core = with_trainer(folders[0]) if has_trainer else make_core(folders[0])
    items = list(load_file(folders[1] / "model.safetensors").items())
    load(core, items)
    core.collective_rpc(RpcCall(_fail_next_step))
    results = {"r": Result()}
    add(core, "r", PROMPTS[0], greedy(10))
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert core.step() == []
    assert "weights of version 1 with it" in str(call(core, "weight_update_status").why_undefined)
    load(core, items)
    finish(core, results)
    assert results["r"].tokens == expected[1][0]
    # Those of a folder are loaded again by their path.
    core.collective_rpc(RpcCall("reload_weights", (str(folders[0]),)))
    core.collective_rpc(RpcCall(_fail_next_step))
    assert tokens(core) == expected[0]
    core.close()


def test_a_worker_that_is_lost_in_an_update_has_the_weights_before_it(
    folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    core = make_core(folders[0])
    items = list(load_file(folders[1] / "model.safetensors").items())
    load(core, items[:7])
    core.collective_rpc(RpcCall(_fail_next_step))
    core._interrupted = "a worker was lost"
    results = {"r": Result()}
    add(core, "r", PROMPTS[0], greedy(10))
    finish(core, results)
    assert results["r"].tokens == expected[0][0]
    with pytest.raises(WeightTransferFailed, match="have those of version 0 again. Send all tensors again"):
        load(core, items[7:])
    load(core, items[7:])
    add(core, "waits", PROMPTS[0], greedy(10))
    assert [core.step() for _ in range(4)] == [[]] * 4
    load(core, items[:7])
    results = {"waits": Result()}
    finish(core, results)
    assert results["waits"].tokens == expected[1][0]
    core.close()


def test_load_weights_is_kept(folders: tuple[Path, Path], expected: list[list[list[int]]], tmp_path: Path) -> None:
    core = with_trainer(folders[0], recovery="keep", recovery_dir=str(tmp_path))
    for item in load_file(folders[1] / "model.safetensors").items():
        load(core, [item])
    core.collective_rpc(RpcCall(_fail_next_step))
    assert tokens(core) == expected[1]
    assert call(core, "weight_update_status").version == core.stats().weight_version == 1
    # Workers start with the checkpoint, not with a kept version that is gone.
    load(core, list(load_file(folders[0] / "model.safetensors").items()))
    assert [path.name for path in tmp_path.glob("engine-0/*")] == ["version-2"]
    core.collective_rpc(RpcCall(_fail_next_step))
    assert tokens(core) == expected[0]
    core.close()


CALLS: dict[str, Callable[[list[tuple[str, Tensor]]], RpcCall]] = {
    "apply_model": lambda items: RpcCall("apply_model", (lambda model: model.load_weights(items),)),
    "function": lambda items: RpcCall(lambda worker: worker.get_model().load_weights(iter(items))),
    "runner": lambda items: RpcCall(lambda worker: worker.model_runner.model.load_weights(items)),
    "extension": lambda items: RpcCall("take_from_trainer", (items,)),
}


class Extension:
    """Worker extension of a trainer."""

    def take_from_trainer(self, items: list[tuple[str, Tensor]]) -> None:
        worker: Any = self
        worker.get_model().load_weights(items)


@pytest.mark.parametrize("way", CALLS)
def test_the_models_load_weights_is_an_update(
    folders: tuple[Path, Path], expected: list[list[list[int]]], way: str
) -> None:
    core = make_core(folders[0], worker_extension_cls=f"{__name__}.Extension" if way == "extension" else None)
    assert tokens(core) == expected[0]
    items = list(load_file(folders[1] / "model.safetensors").items())
    (names,) = core.collective_rpc(CALLS[way](items[:7]))
    assert names == (None if way == "extension" else {name for name, _ in items[:7]})
    assert not core.stats().state.is_ready
    core.collective_rpc(CALLS[way](items[7:]))
    assert (core.stats().state.is_ready, core.stats().weight_version) == (True, 1)
    assert tokens(core) == expected[1]
    core.collective_rpc(RpcCall(_fail_next_step))
    results = {"r": Result()}
    add(core, "r", PROMPTS[0], greedy(10))
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert core.step() == []
    assert "weights of version 1 with it" in str(call(core, "weight_update_status").why_undefined)
    core.collective_rpc(CALLS[way](items))
    finish(core, results)
    assert results["r"].tokens == expected[1][0]
    core.close()


def test_functions_that_load_nothing_leave_the_weights_of_the_start(
    folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    core = make_core(folders[0])
    core.collective_rpc(RpcCall(lambda worker: None))
    core.collective_rpc(RpcCall(_fail_next_step))
    assert tokens(core) == expected[0]
    assert core.stats().weight_version == 0
    core.close()


def load(core: EngineCore, items: list[tuple[str, Any]]) -> None:
    core.collective_rpc(RpcCall("load_weights", (items,)))


def test_reload_weights_without_a_path_keeps_the_newest_weights(
    folders: tuple[Path, Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    items = list(load_file(folders[1] / "model.safetensors").items())
    for is_kept in (False, True):
        kept = {"recovery": "keep", "recovery_dir": str(tmp_path)} if is_kept else {}
        core = with_trainer(folders[0], **kept)
        load(core, items)
        core.collective_rpc(RpcCall("reload_weights"))
        assert tokens(core) == expected[1]
        load(core, [(name, 2 * tensor) for name, tensor in items[:3]])
        if is_kept:
            core.collective_rpc(RpcCall("reload_weights"))
            assert tokens(core) == expected[1]
            assert call(core, "weight_update_status").version == 1
        else:
            with pytest.raises(
                LifecycleError, match=r"are those of version 1, which a trainer has sent.*name a folder"
            ):
                core.collective_rpc(RpcCall("reload_weights"))
            core.collective_rpc(RpcCall("reload_weights", (str(folders[0]),)))
            assert tokens(core) == expected[0]
            # These are the newest ones then.
            load(core, items[:3])
            core.collective_rpc(RpcCall("reload_weights"))
            assert tokens(core) == expected[0]
        core.close()


def test_the_engines_state_says_that_an_update_has_failed(folders: tuple[Path, Path]) -> None:
    core = with_trainer(folders[0])
    assert call(core, "engine_state").is_running
    call(core, "start_weight_update")
    core.collective_rpc(RpcCall(lambda worker: worker.updates.take([_first_item(folders[1])])))
    assert "a weight update has begun" in call(core, "engine_state").undefined
    with pytest.raises(CheckpointError, match="missing"):
        call(core, "finish_weight_update")
    state = call(core, "engine_state")
    assert (state.name, state.is_running) == ("weights undefined", False)
    assert f"failed after it had replaced 1 tensors ({_first_item(folders[1])[0]})" in state.undefined
    update(core, folders[1])
    assert call(core, "engine_state").is_running
    core.close()


def test_no_block_of_older_weights_is_hit_while_one_is_held(
    folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    core = with_trainer(folders[0])
    prompt = random_prompts([40], 97)[0]
    assert run(core, [prompt], greedy(4))[0].tokens
    (again,) = run(core, [prompt], greedy(4))
    assert again.num_cached_tokens == 32
    # A transfer holds blocks, so that the cache cannot be cleared.
    add(core, "held", prompt, greedy(8))
    core.step()
    core.scheduler.kv_cache.hold_blocks("held", "a transfer")
    update(core, folders[1])
    assert core.scheduler.kv_cache.num_used_blocks
    core.abort_requests(["held"])
    (after,) = run(core, [prompt], greedy(4))
    assert after.num_cached_tokens == 0
    fresh = make_core(folders[1])
    assert after.tokens == run(fresh, [prompt], greedy(4))[0].tokens
    fresh.close()
    core.close()


def _first_item(folder: Path) -> tuple[str, Tensor]:
    return next(iter(load_file(folder / "model.safetensors").items()))
