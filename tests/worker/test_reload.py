"""New weights while an engine runs: what succeeds equals a fresh engine, what fails changes nothing."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import CheckpointError, ModelError, ModelNotFound, OutOfMemory
from penstock.models.causal_lm import CausalLM
from penstock.worker.worker import Worker
from support.checkpoints import edit_config, save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import Result, add, assert_greedy_continuation, finish, greedy, make_core, random_prompts, run

PROMPTS = random_prompts([5, 21, 40], 97)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("old"), seed=1).folder


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("new"), seed=2).folder


@pytest.fixture
def core(old: Path) -> Iterator[EngineCore]:
    core = make_core(old)
    yield core
    core.close()


@pytest.fixture(scope="module")
def tokens_of_old(old: Path) -> list[list[int]]:
    return fresh_tokens(old)


@pytest.fixture(scope="module")
def tokens_of_new(new: Path) -> list[list[int]]:
    return fresh_tokens(new)


def fresh_tokens(folder: Path, **options: Any) -> list[list[int]]:
    """Tokens of an engine that never had other weights."""
    core = make_core(folder, **options)
    expected = tokens(core)
    core.close()
    return expected


def reload(core: EngineCore, folder: Path | str | None = None) -> None:
    core.collective_rpc(RpcCall("reload_weights", () if folder is None else (str(folder),)))


def tokens(core: EngineCore) -> list[list[int]]:
    return [result.tokens for result in run(core, PROMPTS, greedy(20))]


def start(core: EngineCore, num_steps: int, max_tokens: int = 20) -> dict[str, Result]:
    """All prompts, after so many steps of an engine that hands over the tokens of one at a time."""
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt, greedy(max_tokens))
    results: dict[str, Result] = {f"r{index}": Result() for index in range(len(PROMPTS))}
    for _ in range(num_steps):
        for output in core.step():
            results[output.req_id].take(output)
    assert core.has_unfinished_requests(), "nothing is left to go on with"
    return results


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    content = load_file(path)
    edit(content)
    save_file(content, path, {"format": "pt"})


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_tensor(folder: Path) -> None:
    edit_weights(folder, lambda content: content.pop("model.norm.weight"))


def misshape_tensor(folder: Path) -> None:
    edit_weights(folder, lambda content: content.update({"model.norm.weight": torch.zeros(7)}))


def lose_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def other_architecture(folder: Path) -> None:
    edit_config(folder, architectures=["Qwen2ForCausalLM"])


def other_shape(folder: Path) -> None:
    shutil.rmtree(folder)
    tiny_checkpoint(folder, intermediate_size=80)


def other_vocabulary(folder: Path) -> None:
    shutil.rmtree(folder)
    tiny_checkpoint(folder, vocab_size=98)


def shorter_context(folder: Path) -> None:
    edit_config(folder, max_position_embeddings=64)


DAMAGES = [
    (truncate, CheckpointError, r"model\.safetensors is damaged"),
    (lose_tensor, CheckpointError, r"1 missing: model\.norm\.weight"),
    (misshape_tensor, CheckpointError, r"1 misshapen: model\.norm\.weight \(has \[7\], needs \[64\]\)"),
    (lose_file, CheckpointError, r"There is no model\.safetensors"),
    (spoil_config, ModelError, r"config\.json is damaged"),
    (other_architecture, ModelError, "architecture Qwen2ForCausalLM, but this engine runs LlamaForCausalLM"),
    (other_shape, ModelError, r"gate_up_proj\.weight \(was \[224, 64\], would be \[160, 64\]\)"),
    (other_vocabulary, ModelError, r"vocab_size \(was 97, would be 98\)"),
    (shorter_context, ModelError, "made for 64 positions .* serves 128"),
]


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGES, ids=[damage.__name__ for damage, _, _ in DAMAGES])
def test_a_reload_that_fails_leaves_the_old_weights_serving(
    old: Path,
    new: Path,
    tokens_of_old: list[list[int]],
    tokens_of_new: list[list[int]],
    tmp_path: Path,
    damage: Callable[[Path], None],
    error: type[Exception],
    message: str,
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(new, broken)
    damage(broken)
    core = make_core(old)
    running = start(core, num_steps=6)
    preemptions = core.scheduler.num_preemptions
    with pytest.raises(error, match=message):
        reload(core, broken)
    finish(core, running)
    assert [result.tokens for result in running.values()] == tokens_of_old
    assert core.scheduler.num_preemptions == preemptions
    assert tokens(core) == tokens_of_old
    # Nor does it stand in the way of one that succeeds.
    reload(core, new)
    assert tokens(core) == tokens_of_new
    core.close()


def test_a_folder_that_does_not_exist(core: EngineCore, tmp_path: Path) -> None:
    before = tokens(core)
    with pytest.raises(ModelNotFound, match="nowhere"):
        reload(core, tmp_path / "nowhere")
    assert tokens(core) == before


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_after_a_reload_are_those_of_a_fresh_engine(tmp_path: Path, family: str) -> None:
    """Also what config.json changes without changing a shape, and layers whose weights are packed."""
    sizes: dict[str, Any] = {"intermediate_size": 4200, "head_dim": 32} if family == "qwen3" else {}
    for seed, theta in ((1, 10000.0), (2, 500.0)):
        model = tiny_model(family, seed=seed, rope_parameters={"rope_type": "default", "rope_theta": theta}, **sizes)
        save_checkpoint(model, tmp_path / str(seed))
    core, fresh = make_core(tmp_path / "1"), make_core(tmp_path / "2")
    first, expected = tokens(core), tokens(fresh)
    assert first != expected
    reload(core, tmp_path / "2")
    assert tokens(core) == expected
    reload(core, tmp_path / "1")
    assert tokens(core) == first
    core.close()
    fresh.close()


def test_the_same_folder_is_read_again(tmp_path: Path, new: Path, tokens_of_new: list[list[int]]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", seed=1).folder
    core = make_core(folder)
    assert tokens(core) != tokens_of_new
    shutil.copyfile(new / "model.safetensors", folder / "other.safetensors")
    (folder / "other.safetensors").replace(folder / "model.safetensors")
    reload(core)
    assert tokens(core) == tokens_of_new
    core.close()


def test_a_folder_of_weights_alone_keeps_the_configuration(
    core: EngineCore, new: Path, tmp_path: Path, tokens_of_new: list[list[int]]
) -> None:
    shutil.copyfile(new / "model.safetensors", tmp_path / "model.safetensors")
    reload(core, tmp_path)
    assert tokens(core) == tokens_of_new


@pytest.mark.parametrize("is_async", [False, True])
def test_running_requests_go_on_from_their_tokens_with_the_new_weights(old: Path, new: Path, is_async: bool) -> None:
    core = make_core(old, async_scheduling=is_async)
    results = start(core, num_steps=8)
    in_flight = {
        req_id: core.scheduler._requests.by_id[req_id].num_output_placeholders
        for req_id in results  # what is on its way
    }
    known = {req_id: len(result.tokens) + in_flight[req_id] for req_id, result in results.items()}
    assert all(0 < count < 20 for count in known.values())
    assert any(in_flight.values()) == is_async
    reload(core, new)
    finish(core, results)
    before, after = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    for index, prompt in enumerate(PROMPTS):
        result, count = results[f"r{index}"], known[f"r{index}"]
        assert len(result.tokens) == 20
        assert_greedy_continuation(before, prompt, Result(tokens=result.tokens[:count]))
        assert_greedy_continuation(after, [*prompt, *result.tokens[:count]], Result(tokens=result.tokens[count:]))
    core.close()


def test_requests_aborted_right_after_a_reload_leave_nothing_behind(old: Path, new: Path) -> None:
    core = make_core(old)
    start(core, num_steps=6)
    reload(core, new)
    core.abort_requests(["r0", "r2"])
    finish(core, {})
    while core.scheduler.has_work():
        core.step()
    (num_reqs,) = core.collective_rpc(RpcCall(lambda worker: worker.runner.requests.num_reqs))
    assert num_reqs == 0
    assert core.scheduler.kv_cache.num_used_blocks == 0


def test_cached_prefixes_are_forgotten(core: EngineCore, new: Path) -> None:
    run(core, [PROMPTS[2]], greedy(4))
    assert run(core, [PROMPTS[2]], greedy(4))[0].num_cached_tokens > 0
    reload(core, new)
    assert run(core, [PROMPTS[2]], greedy(4))[0].num_cached_tokens == 0


def _fail_next_step(worker: Worker) -> None:
    def fail(output: object) -> None:
        raise RuntimeError("the worker is gone")

    worker.execute_model = fail  # type: ignore[method-assign, assignment]


def test_a_worker_that_is_replaced_has_the_reloaded_weights(
    core: EngineCore, new: Path, tokens_of_new: list[list[int]]
) -> None:
    reload(core, new)
    core.collective_rpc(RpcCall(_fail_next_step))
    assert tokens(core) == tokens_of_new


def test_a_worker_that_is_replaced_before_the_reload_has_the_old_weights_and_the_new_options(
    core: EngineCore, new: Path, tokens_of_old: list[list[int]], tokens_of_new: list[list[int]]
) -> None:
    core.collective_rpc(RpcCall("update_config", ({"model_config": {"model": str(new)}},)))
    core.collective_rpc(RpcCall(_fail_next_step))
    assert tokens(core) == tokens_of_old
    reload(core)
    assert tokens(core) == tokens_of_new


def test_random_weights_become_those_of_a_checkpoint(new: Path, tokens_of_new: list[list[int]]) -> None:
    core = make_core(new, load_format="dummy")
    assert tokens(core) != tokens_of_new
    core.collective_rpc(RpcCall("update_config", ({"load_config": {"load_format": "auto"}},)))
    reload(core)
    assert tokens(core) == tokens_of_new
    core.close()


def test_a_saved_state_is_reloaded_as_one(
    core: EngineCore,
    old: Path,
    new: Path,
    tokens_of_old: list[list[int]],
    tokens_of_new: list[list[int]],
    tmp_path: Path,
) -> None:
    core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / "old"),), {"max_size": 40_000}))
    reload(core, new)
    core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / "new"),), {"max_size": 40_000}))
    saved = make_core(tmp_path / "old", load_format="sharded_state")
    assert tokens(saved) == tokens_of_old
    (tmp_path / "new" / "model-rank-0-part-1.safetensors").rename(tmp_path / "part")
    with pytest.raises(CheckpointError, match=r"lacks model-rank-0-part-1\.safetensors"):
        reload(saved, tmp_path / "new")
    assert tokens(saved) == tokens_of_old
    (tmp_path / "part").rename(tmp_path / "new" / "model-rank-0-part-1.safetensors")
    reload(saved, tmp_path / "new")
    assert tokens(saved) == tokens_of_new
    saved.close()


def test_the_old_model_is_given_back(core: EngineCore, new: Path) -> None:
    for _ in range(2):
        reload(core, new)
    gc.collect()
    assert len([thing for thing in gc.get_objects() if isinstance(thing, CausalLM)]) == 1


def test_a_reload_without_room_is_refused_before_it_begins(
    core: EngineCore, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tokens(core)
    monkeypatch.setattr("penstock.worker.weights.weights_size_bytes", lambda model: 1 << 60)
    with pytest.raises(OutOfMemory, match=r"The old weights stay until .* takes 1073741824\.00 GiB more"):
        core.collective_rpc(RpcCall("reload_weights", (str(new),), {"atomic": True}))
    monkeypatch.undo()
    assert tokens(core) == before


def test_other_end_tokens_are_reported(
    core: EngineCore, new: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(new, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    with caplog.at_level("WARNING", "penstock"):
        reload(core, tmp_path / "model")
    assert r"ends texts with the tokens [2, 5], but this engine goes on ending them with [2]" in caplog.text
