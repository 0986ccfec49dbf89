"""Weights that a trainer hands to a running engine, tensor by tensor: it then is a fresh engine with these weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import CheckpointError, LifecycleError, UnsupportedFeature
from penstock.layers.tensors_of import tensors_of
from penstock.worker.worker import Worker
from support.adapted_models import OPTIONS as WITH_ADAPTERS
from support.adapted_models import PROMPTS as ADAPTED_PROMPTS
from support.adapted_models import adapted
from support.adapted_models import run as run_adapted
from support.adapters import VARIANTS
from support.checkpoints import tiny_checkpoint
from support.draft_heads import eagle3_weights, eagle_weights, write_head, write_mimo
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run

PROMPTS = random_prompts([5, 21, 40], 97)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    for seed, folder in enumerate(made):
        tiny_checkpoint(folder, "qwen2", seed=seed, tie_word_embeddings=True)
    return made[0], made[1]


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[list[int]]]:
    """Tokens with the old and the new weights."""
    return [fresh_tokens(folder) for folder in folders]


@pytest.fixture
def core(folders: tuple[Path, Path]) -> Iterator[EngineCore]:
    core = make_core(folders[0])
    yield core
    core.close()


def fresh_tokens(folder: Path, **options: Any) -> list[list[int]]:
    core = make_core(folder, **options)
    made = tokens(core)
    core.close()
    return made


def tokens(core: EngineCore) -> list[list[int]]:
    return [result.tokens for result in run(core, PROMPTS, greedy(12))]


def shuffled(folder: Path, seed: int = 0) -> list[tuple[str, Tensor]]:
    items = list(load_file(folder / "model.safetensors").items())
    random.Random(seed).shuffle(items)
    return items


def worker_of(core: EngineCore) -> Worker:
    found: list[Worker] = []
    core.collective_rpc(RpcCall(lambda worker: found.append(worker)))
    return found[0]


def load(core: EngineCore, *tensors: tuple[str, Tensor]) -> None:
    core.collective_rpc(RpcCall("load_weights", (list(tensors),)))


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
@pytest.mark.one_case_quick
def test_norms_that_add_an_offset_to_their_weights_have_the_new_ones(family: str, tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        tiny_checkpoint(tmp_path / name, family, seed=seed)
    expected = fresh_tokens(tmp_path / "new", dtype="float32")
    core = make_core(tmp_path / "old", dtype="float32")
    # Programs are recorded.
    assert tokens(core) != expected
    load(core, *shuffled(tmp_path / "new"))
    assert tokens(core) == expected
    core.close()


def test_one_tensor_per_call(core: EngineCore, folders: tuple[Path, Path], expected: list[list[list[int]]]) -> None:
    worker = worker_of(core)
    assert tokens(core) == expected[0]
    programs = dict(worker.runner.execution.programs._recorded)  # type: ignore[attr-defined]
    places = {one.path: one.tensor.data_ptr() for one in tensors_of(worker.weights.model)}
    for number, folder in enumerate([folders[1], folders[0], folders[1]]):
        for item in shuffled(folder, seed=number):
            assert worker.updates.version == number
            load(core, item)
        assert worker.updates.version == number + 1
        assert worker.updates.why_undefined is None
        assert tokens(core) == expected[1 - number % 2]
    assert places == {one.path: one.tensor.data_ptr() for one in tensors_of(worker.weights.model)}
    assert programs.items() <= worker.runner.execution.programs._recorded.items()  # type: ignore[attr-defined]


def test_tensors_after_the_last_one_open_nothing(
    core: EngineCore, folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    items = shuffled(folders[1])
    load(core, *items)
    embedding = dict(items)["model.embed_tokens.weight"]
    load(core, ("lm_head.weight", embedding.clone()), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)))
    assert worker_of(core).updates.version == 1
    assert tokens(core) == expected[1]


def test_no_step_runs_while_weights_are_undefined(core: EngineCore, folders: tuple[Path, Path]) -> None:
    load(core, *shuffled(folders[1])[:4])
    add(core, "waits", PROMPTS[0], greedy(12))
    assert core.step() == []
    with pytest.raises(LifecycleError, match="weights are undefined: a weight update has begun"):
        worker_of(core).updates.check_defined()


def test_a_failed_update_says_what_was_replaced_and_a_reload_ends_it(
    core: EngineCore, folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    worker, items = worker_of(core), shuffled(folders[1])
    worker.updates.start()
    worker.updates.take(items[:3])
    with pytest.raises(LifecycleError, match="going on already"):
        worker.updates.start()
    with pytest.raises(CheckpointError, match="missing"):
        worker.updates.finish()
    assert f"replaced 3 tensors ({items[0][0]}" in str(worker.updates.why_undefined)
    core.collective_rpc(RpcCall("reload_weights", (str(folders[1]),)))
    assert worker.updates.why_undefined is None
    assert tokens(core) == expected[1]


@pytest.mark.parametrize("num_before", [0, 1])
def test_the_engines_state_says_at_once_why_a_tensor_failed(
    core: EngineCore, folders: tuple[Path, Path], num_before: int
) -> None:
    items = dict(load_file(folders[1] / "model.safetensors"))
    name = "model.embed_tokens.weight"
    worker_of(core).updates.start()

    def gone() -> Iterator[tuple[str, Tensor]]:
        yield from [(name, items[name])][:num_before]
        raise OSError("the trainer is gone")

    with pytest.raises(OSError, match="the trainer is gone"):
        worker_of(core).updates.take(gone())
    (state,) = core.collective_rpc(RpcCall("engine_state"))
    when = f"after it had replaced 1 tensors ({name})" if num_before else "before a tensor was complete"
    assert state.undefined == f"a weight update failed {when}: OSError: the trainer is gone"
    assert core.step() == []


def test_the_engines_state_says_why_one_of_many_calls_failed(core: EngineCore, folders: tuple[Path, Path]) -> None:
    embedding = load_file(folders[1] / "model.safetensors")["model.embed_tokens.weight"]
    load(core, ("model.embed_tokens.weight", embedding))
    with pytest.raises(CheckpointError, match="lm_head"):
        load(core, ("lm_head.weight", embedding + 1))
    (state,) = core.collective_rpc(RpcCall("engine_state"))
    assert "1 tensors (model.embed_tokens.weight)" in state.undefined
    assert "lm_head.weight is tied to model.embed_tokens.weight in this engine, but has other values" in state.undefined
    # The next one begins again, and says what came of it.
    load(core, ("model.embed_tokens.weight", embedding))
    (state,) = core.collective_rpc(RpcCall("engine_state"))
    assert state.undefined == "a weight update has begun and is not finished"


def test_an_atomic_update_leaves_the_old_weights_until_it_is_finished(
    core: EngineCore, folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    updates, items = worker_of(core).updates, shuffled(folders[1])
    updates.start(is_atomic=True)
    updates.take(items[:-1])
    assert tokens(core) == expected[0]
    with pytest.raises(CheckpointError, match="missing"):
        updates.finish()
    assert tokens(core) == expected[0]
    updates.start(is_atomic=True)
    updates.take(items)
    assert updates.finish(version=7) == 7
    core.reset_prefix_cache(reset_running_requests=True)
    assert tokens(core) == expected[1]


def test_running_requests_go_on_from_their_tokens(core: EngineCore, folders: tuple[Path, Path]) -> None:
    results = {f"r{index}": Result() for index in range(len(PROMPTS))}
    for (req_id, _), prompt in zip(results.items(), PROMPTS, strict=True):
        add(core, req_id, prompt, greedy(20))
    for _ in range(6):
        for output in core.step():
            results[output.req_id].take(output)
    known = {req_id: list(result.tokens) for req_id, result in results.items()}
    load(core, *shuffled(folders[1]))
    finish(core, results)
    fresh = make_core(folders[1])
    for prompt, (req_id, result) in zip(PROMPTS, results.items(), strict=True):
        begun = known[req_id]
        assert result.tokens[: len(begun)] == begun
        (rest,) = run(fresh, [[*prompt, *begun]], greedy(20 - len(begun)))
        assert result.tokens[len(begun) :] == rest.tokens
    fresh.close()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_targets(folders: tuple[Path, Path], quantization: str) -> None:
    """Calibrated ones need the float model, which is calibrated again."""
    for calibration in ("none", "auto"):
        options = {"quantization": quantization, "quantization_calibration": calibration}
        core = make_core(folders[0], **options)
        load(core, *shuffled(folders[1]))
        assert tokens(core) == fresh_tokens(folders[1], **options)
        core.close()


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_targets_of_draft_heads(method: str, tmp_path: Path) -> None:
    """The heads stay as they were, and read the new embeddings of their target."""
    for seed, name in enumerate(("old", "new")):
        if method == "mtp":
            write_mimo(tmp_path / name, seed=seed)
        else:
            tiny_checkpoint(tmp_path / name, seed=seed, num_hidden_layers=5)
    drafter: dict[str, Any] = {"method": method, "num_speculative_tokens": 1 if method == "mtp" else 3}
    if method == "eagle":
        drafter["model"] = str(write_head(tmp_path / method, eagle_weights()))
    elif method == "eagle3":
        drafter["model"] = str(write_head(tmp_path / method, eagle3_weights(), draft_vocab_size=40))
    core, fresh = (
        make_core(tmp_path / name, speculative_config={**drafter, "adaptive": False}) for name in ("old", "new")
    )
    run(core, PROMPTS, greedy(12))
    before = core.scheduler.spec_decode_metrics.num_accepted_tokens
    load(core, *shuffled(tmp_path / "new"))
    made = [run(one, PROMPTS, greedy(12, logprobs=2)) for one in (core, fresh)]
    assert made[0] == made[1]
    metrics = [one.scheduler.spec_decode_metrics.num_accepted_tokens for one in (core, fresh)]
    assert metrics[0] - before == metrics[1]
    core.close()
    fresh.close()


def test_targets_of_adapters(tmp_path: Path) -> None:
    # Without those of embeddings: with them PEFT saves the target's own weight, and another one is refused.
    variants, numbers = [VARIANTS[1], VARIANTS[2], VARIANTS[5]], [1, 0, 2, 3]
    with adapted(tmp_path / "old", variants=variants) as model:
        new = tiny_checkpoint(tmp_path / "new", seed=5).folder
        core, fresh = (make_core(folder, **WITH_ADAPTERS) for folder in (model.folder, new))
        prompts = ADAPTED_PROMPTS[: len(numbers)]
        run_adapted(core, model, prompts, numbers)
        load(core, *shuffled(new))
        assert run_adapted(core, model, prompts, numbers) == run_adapted(fresh, model, prompts, numbers)
        core.close()
        fresh.close()


def test_random_weights_become_those_of_a_trainer(folders: tuple[Path, Path], expected: list[list[list[int]]]) -> None:
    core = make_core(folders[0], load_format="dummy", dtype="float32")
    load(core, *shuffled(folders[1]))
    assert tokens(core) == expected[1]
    core.close()


def test_kernel_format_is_that_of_saved_states(
    core: EngineCore, folders: tuple[Path, Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    other = make_core(folders[1])
    other.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path),)))
    other.close()
    updates = worker_of(core).updates
    updates.start(is_checkpoint_format=False)
    updates.take(load_file(tmp_path / "model-rank-0-part-0.safetensors").items())
    updates.finish()
    assert tokens(core) == expected[1]


def test_models_of_transformers_take_a_copy(tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        tiny_checkpoint(tmp_path / name, seed=seed)
    core = make_core(tmp_path / "old", model_impl="transformers")
    load(core, *shuffled(tmp_path / "new"))
    assert tokens(core) == fresh_tokens(tmp_path / "new", model_impl="transformers")
    core.close()


def test_files_of_blocks_are_refused_by_name(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.worker.weights.find_gguf", lambda *_: object())
    with pytest.raises(UnsupportedFeature, match="is a GGUF file"):
        worker_of(core).updates.start()
