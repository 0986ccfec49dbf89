"""Blocks in a folder beside other features, several ranks, and processes that are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.replay import replay
from penstock.features.kv_tiers.scheduling import TierScheduling
from support.arrangements import PARAMS, PROMPTS, VOCAB_SIZE, assert_same, some_steps
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import Result, finish, greedy, make_core, run
from support.kept_blocks import files

PLAY = "ROMEO:\n" + "What light through yonder window breaks? It is the east. " * 6
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[Result]:
    core = make_core(model, max_model_len=128)
    try:
        return run(core, PROMPTS, PARAMS)
    finally:
        core.close()


@contextlib.contextmanager
def engine(model: Path, folder: Path, **options: Any) -> Iterator[EngineCore]:
    core = make_core(model, kv_offload_dir=str(folder), max_model_len=128, **options)
    try:
        yield core
    finally:
        core.close()


def hits(core: EngineCore) -> int:
    return core.stats().counters["external_prefix_cache_hits"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_of_which_one_rank_lacks_its_share_is_saved_anew(
    tmp_path: Path, folder: Path, undisturbed: list[Result], rank: int
) -> None:
    model, options = tmp_path / "model", {"tensor_parallel_size": 2, "num_threads": 2}
    tiny_checkpoint(model, vocab_size=VOCAB_SIZE)
    with engine(model, folder, kv_load_policy="always", **options) as core:
        assert_same(run(core, PROMPTS, PARAMS), undisturbed)
        of_rank = Path(core.collective_rpc(RpcCall("kv_tier_folder"))[rank])
    blocks = files(of_rank)
    for path in blocks[::2]:
        path.unlink()
    with engine(model, folder, kv_load_policy="always", **options) as core:
        assert_same(run(core, PROMPTS, PARAMS), undisturbed)
    with engine(model, folder, kv_load_policy="always", **options) as core:
        assert_same(run(core, PROMPTS, PARAMS), undisturbed)
        assert core.stats().counters["kv_tier_failed_loads"] == 0
        assert hits(core) > 0


RANKS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "context": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", RANKS)
def test_each_rank_keeps_its_share_and_is_killed(
    tmp_path: Path, folder: Path, undisturbed: list[Result], arrangement: str
) -> None:
    family = {"num_key_value_heads": 1} if arrangement == "context" else {}
    model = tmp_path / "model"
    tiny_checkpoint(model, vocab_size=VOCAB_SIZE, **family)
    options = {**RANKS[arrangement], "num_threads": 2}
    if family:
        core = make_core(model, max_model_len=128, **options)
        undisturbed = run(core, PROMPTS, PARAMS)
        core.close()
    with engine(model, folder, **options) as core:
        assert_same(run(core, PROMPTS, PARAMS), undisturbed)
    for victim in (0, 1):
        with engine(model, folder, **options) as core:
            results = some_steps(core)
            os.kill(core._executor.process_ids[victim], signal.SIGKILL)  # type: ignore[attr-defined]
            finish(core, results)
            assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)
            core.scheduler.kv_cache.check_integrity()
            assert hits(core) > 0
            assert core.reset_prefix_cache()


@pytest.mark.slow
def test_a_core_is_killed_while_it_saves_and_loads(model: Path, folder: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": "8MiB"}
    prompts = [PLAY + " ".join(["light"] * length) for length in (1, 5, 30, 60, 80)]
    with LLM("demo", **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    with LLM("demo", kv_offload_dir=str(folder), enable_multiprocessing=True, **options) as llm:
        core_id = llm.collective_rpc(_process_id)[0]
        for turn in range(3):
            outputs = llm.generate(prompts, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            if turn < 2:
                os.kill(core_id, signal.SIGKILL)
                outputs = llm.generate(prompts, GREEDY)
                assert [output.outputs[0].token_ids for output in outputs] == expected
                core_id = llm.collective_rpc(_process_id)[0]


def _process_id(worker: Any) -> int:
    return os.getpid()


@pytest.mark.slow
def test_engines_beside_each_other_share_a_folder(folder: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": "8MiB", "data_parallel_size": 2}
    prompts = [f"{PLAY}{number}" for number in range(8)]
    with LLM("demo", **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    for _ in range(2):
        with LLM("demo", kv_offload_dir=str(folder), **options) as llm:
            outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(output.num_cached_tokens for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "suffix"])
def test_drafts_of_a_prefix_that_is_loaded(folder: Path, method: str) -> None:
    options: dict[str, Any] = {
        "max_model_len": 512,
        "kv_cache_memory_bytes": "8MiB",
        "speculative_config": {"method": method, "num_speculative_tokens": 3},
    }
    with LLM("demo", **options) as llm:
        expected = llm.generate(PLAY, GREEDY)[0]
    for _ in range(2):
        with LLM("demo", kv_offload_dir=str(folder), **options) as llm:
            output = llm.generate(PLAY, GREEDY)[0]
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs
    assert output.num_cached_tokens > 50


def test_blocks_outlive_a_sleep(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPTS[3]]
    with engine(model, folder) as core:
        with monkeypatch.context() as patched:
            patched.setattr(TierScheduling, "before_step", lambda self: None)
            expected = run(core, prompts, greedy(8))
        # What was not saved beside the steps is saved before the memory is given back.
        while not all(core.collective_rpc(RpcCall("pause"))):
            core.step()
        core.collective_rpc(RpcCall("resume"))
        core.collective_rpc(RpcCall("sleep"))
        core.collective_rpc(RpcCall("wake_up"))
        assert run(core, prompts, greedy(8))[0].tokens == expected[0].tokens
        assert hits(core) == 80


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_recording_of_an_engine_that_loads_is_replayed(tmp_path: Path, folder: Path, family: str) -> None:
    save_checkpoint(tiny_model(family, vocab_size=VOCAB_SIZE), tmp_path / "model")
    file, secret = tmp_path / "steps.rec", tmp_path / "secret"
    secret.write_text("a secret of some length")
    options = {
        "kv_load_policy": "always",
        "kv_offloading_size": 0.01,
        "kv_offload_dir_size": 1,
        "kv_peers": "127.0.0.1:1",
        "kv_secret_file": str(secret),
    }
    with engine(tmp_path / "model", folder) as core:
        expected = run(core, PROMPTS[:4], greedy(12))
    with engine(tmp_path / "model", folder, record=str(file), record_prompts=True, **options) as core:
        found = run(core, PROMPTS[:4], greedy(12))
        assert hits(core) > 0
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    # On another machine there are neither.
    shutil.rmtree(folder)
    secret.unlink()
    report = replay(file, model=str(tmp_path / "model"))
    assert report.num_compared > 0
    assert not report.differences, report
