"""Blocks that are removed, or cannot be written, while an engine saves and loads them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import PenstockError
from penstock.features.kv_files.files import ABOUT, read_block, write_described
from penstock.features.kv_tiers.moves import Move
from penstock.features.kv_tiers.scheduling import TierScheduling
from penstock.features.kv_tiers.worker import TierWorker
from penstock.scheduler.request import Request
from support.checkpoints import tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, run
from support.features import scheduler_side
from support.kept_blocks import PROMPTS, answers, branching_prompts, counter, files, same
from support.random_requests import run_at_random


@contextlib.contextmanager
def engine(tmp_path: Path, model: str = "model", **options: Any) -> Iterator[EngineCore]:
    if not (tmp_path / model).exists():
        tiny_checkpoint(tmp_path / model)
    if options:
        options["kv_load_policy"] = "always"
    core = make_core(tmp_path / model, **options)
    try:
        yield core
    finally:
        core.close()


def save_prefix(core: EngineCore) -> int:
    ((num_tokens, _),) = core.collective_rpc(RpcCall("save_kv_prefix", (PROMPTS[0],)))
    return int(num_tokens)


@contextlib.contextmanager
def held_moves(monkeypatch: pytest.MonkeyPatch, *, loads: bool) -> Iterator[threading.Semaphore]:
    """Let all loads, or all saves, wait for the end of the block. Yields a semaphore of those that have begun."""
    begun, may_end, transfer = threading.Semaphore(0), threading.Event(), TierWorker._transfer

    def wait(worker: TierWorker, folder: str, path: str, move: Move) -> int:
        if move.is_load is loads:
            begun.release()
            assert may_end.wait(60)
        return transfer(worker, folder, path, move)

    with monkeypatch.context() as patched:
        patched.setattr(TierWorker, "_transfer", wait)
        try:
            yield begun
        finally:
            may_end.set()


def forget_blocks(core: EngineCore, prompt: Sequence[int] = PROMPTS[0]) -> None:
    """Forget the blocks of a prompt, as those of a request whose KV cache may hold NaN."""
    kv_cache = core.scheduler.kv_cache
    keys = kv_cache.keys_of(Request("", list(prompt), greedy(1)))
    for key in keys:
        kv_cache.groups[key[0]].pool.forget(key)
    kv_cache.watchers.forgotten(keys)


def finish_moves(core: EngineCore) -> None:
    side = scheduler_side(core, TierScheduling)
    give_up_at = time.monotonic() + 60
    while side._saves.fresh or side._is_busy or core.has_unfinished_requests():
        assert time.monotonic() < give_up_at, "blocks are still being moved"
        core.step()


@pytest.mark.parametrize("tiers", ["folder", "host", "both"])
def test_wrong_blocks_that_are_being_saved_are_found_nowhere(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tiers: str
) -> None:
    options = {"kv_offload_dir": str(folder)} if tiers != "host" else {}
    options |= {"kv_offloading_size": 0.01} if tiers != "folder" else {}
    with engine(tmp_path, **options) as core:
        with held_moves(monkeypatch, loads=False) as begun:
            expected = answers(core, PROMPTS[:1], max_tokens=4)
            while not begun.acquire(timeout=0.01):
                core.step()
            forget_blocks(core)
        finish_moves(core)
        kept = counter(core, "kv_tier_saved_bytes") + counter(core, "kv_host_saved_bytes")
        assert kept > 0
        assert not files(folder)
        assert core.reset_prefix_cache()
        assert same(answers(core, PROMPTS[:1], max_tokens=4), expected)
        assert counter(core, "external_prefix_cache_hits") == 0
        # What is computed anew is kept again.
        finish_moves(core)
        assert core.reset_prefix_cache()
        assert same(answers(core, PROMPTS[:1], max_tokens=4), expected)
        assert counter(core, "external_prefix_cache_hits") == 64
        core.scheduler.kv_cache.check_integrity()


def test_wrong_blocks_that_are_being_loaded_are_computed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, kv_offload_dir=str(folder)) as core:
        expected = answers(core, PROMPTS[:1], max_tokens=4)
    with engine(tmp_path, kv_offload_dir=str(folder)) as core:
        with held_moves(monkeypatch, loads=True) as begun:
            add(core, "r", PROMPTS[0], greedy(4, logprobs=2))
            while not begun.acquire(timeout=0.01):
                core.step()
            forget_blocks(core)
        results: dict[str, Result] = {}
        finish(core, results)
        assert same([results["r"]], expected)
        assert counter(core, "external_prefix_cache_hits") == 0
        assert counter(core, "kv_tier_failed_loads") > 0
        core.scheduler.kv_cache.check_integrity()


def test_a_folder_that_is_removed_while_a_block_is_written_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, replace, removed = [np.arange(512, dtype=np.uint8)], os.replace, list[str]()
    path = str(tmp_path / "kv-1" / "digest" / "ab" / "block")

    def remove_before(source: str, target: str) -> None:
        if target == path and not removed:
            removed.append(target)
            shutil.rmtree(tmp_path / "kv-1")
        replace(source, target)

    monkeypatch.setattr("penstock.features.kv_files.files.os.replace", remove_before)
    assert write_described(str(tmp_path / "kv-1" / "digest"), {"model": "m"}, path, pages) == 512
    assert removed
    assert (tmp_path / "kv-1" / "digest" / ABOUT).exists()
    read = [np.zeros(512, dtype=np.uint8)]
    read_block(path, read)
    assert (read[0] == pages[0]).all()


def test_blocks_that_other_engines_remove_all_the_time(tmp_path: Path, folder: Path) -> None:
    with engine(tmp_path) as core:
        expected = answers(core)
    is_over = threading.Event()

    def remove() -> None:
        while not is_over.wait(0.001):
            shutil.rmtree(folder / "kv-1", ignore_errors=True)

    thread = threading.Thread(target=remove)
    with engine(tmp_path, kv_offload_dir=str(folder)) as core:
        thread.start()
        try:
            for _ in range(5):
                assert same(answers(core), expected)
                assert core.reset_prefix_cache()
        finally:
            is_over.set()
            thread.join()
        core.scheduler.kv_cache.check_integrity()
        scheduler_side(core, TierScheduling)._saves._paused_until = 0.0
        assert same(answers(core), expected)
        assert save_prefix(core) == 64
        assert files(folder)


@pytest.mark.parametrize(
    ("error", "is_told"), [(FileNotFoundError(2, "No such file"), False), (OSError(5, "I/O"), True)]
)
def test_a_folder_that_is_gone_is_not_called_full(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: OSError,
    is_told: bool,
) -> None:
    def fail(_: object) -> None:
        raise error

    with engine(tmp_path, kv_offload_dir=str(folder)) as core:
        answers(core, PROMPTS[:1])
        finish_moves(core)
        shutil.rmtree(folder)
        monkeypatch.setattr("penstock.features.kv_files.files.os.statvfs", fail)
        answers(core, PROMPTS[1:])
    assert bool(files(folder)) is not is_told
    assert ("are saved for 60 s: kv_offload_dir cannot be used: [Errno 5] I/O" in caplog.text) is is_told
    assert "full" not in caplog.text


@pytest.mark.parametrize("why", ["no room", "no write"])
def test_a_prefix_that_cannot_be_saved_is_an_error(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with engine(tmp_path, kv_offload_dir=str(folder)) as core:
        expected = answers(core, PROMPTS[:1])
        finish_moves(core)
        shutil.rmtree(folder / "kv-1")
        with monkeypatch.context() as patched:
            if why == "no room":
                patched.setattr("penstock.features.kv_files.files._RESERVE_BYTES", 1 << 60)
                message = "the file system of kv_offload_dir is full"
            else:
                patched.setattr("penstock.features.kv_files.files.os.writev", refuse)
                message = "OSError: .* No space left on device"
            with pytest.raises(PenstockError, match=f"4 of 4 blocks are not saved: {message}"):
                save_prefix(core)
        # It is tried again at once.
        assert save_prefix(core) == 64
    with engine(tmp_path, kv_offload_dir=str(folder)) as core:
        assert same(answers(core, PROMPTS[:1]), expected)
        assert counter(core, "external_prefix_cache_hits") == 64


# Moves that take longer than a reset, a sleep or new weights wait for.


@pytest.fixture
def waits_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.features.kv_tiers.scheduling._LONGEST_END_S", 0.05)


TIERS = {
    "folder": {"kv_offload_dir": "blocks"},
    "host": {"kv_offloading_size": 0.01},
    "both": {"kv_offload_dir": "blocks", "kv_offloading_size": 0.01},
}


def options_of(tiers: str, tmp_path: Path) -> dict[str, Any]:
    return {name: str(tmp_path / one) if isinstance(one, str) else one for name, one in TIERS[tiers].items()}


@pytest.mark.usefixtures("waits_are_short", "folder")
@pytest.mark.parametrize("loads", [True, False], ids=["loads", "saves"])
@pytest.mark.parametrize("tiers", TIERS)
def test_moves_that_outlast_a_reset_and_a_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: str, loads: bool
) -> None:
    with engine(tmp_path, **options_of(tiers, tmp_path)) as core:
        expected = answers(core)
        finish_moves(core)
        assert core.reset_prefix_cache(reset_connector=not loads)
        with held_moves(monkeypatch, loads=loads) as begun:
            add(core, "r", PROMPTS[0], greedy(12, logprobs=2))
            results: dict[str, Result] = {}

            def step() -> None:
                for output in core.step():
                    results.setdefault(output.req_id, Result()).take(output)

            while not begun.acquire(timeout=0.01):
                step()
            # What is being moved is held, so neither is done.
            assert not core.reset_prefix_cache(reset_running_requests=True)
            while not all(core.collective_rpc(RpcCall("pause", ("keep", False)))):
                step()
            with pytest.raises(PenstockError, match="are being transferred. Let the engine sleep once that is done"):
                core.collective_rpc(RpcCall("sleep", (1, "keep")))
        core.collective_rpc(RpcCall("resume"))
        finish(core, results)
        assert same([results["r"]], expected[:1])
        finish_moves(core)
        core.collective_rpc(RpcCall("sleep", (1, "keep")))
        core.collective_rpc(RpcCall("wake_up"))
        assert same(answers(core), expected)
        assert counter(core, "external_prefix_cache_hits") > 0
        core.scheduler.kv_cache.check_integrity()


@pytest.mark.usefixtures("waits_are_short", "folder")
@pytest.mark.parametrize("loads", [True, False], ids=["loads", "saves"])
@pytest.mark.parametrize("tiers", TIERS)
def test_moves_that_outlast_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: str, loads: bool
) -> None:
    tiny_checkpoint(tmp_path / "other", seed=1)
    with engine(tmp_path, model="other") as core:
        of_other = answers(core)
    with engine(tmp_path, **options_of(tiers, tmp_path)) as core:
        answers(core)
        finish_moves(core)
        assert core.reset_prefix_cache(reset_connector=not loads)
        with held_moves(monkeypatch, loads=loads) as begun:
            add(core, "old", PROMPTS[1], greedy(12))
            while not begun.acquire(timeout=0.01):
                core.step()
            core.collective_rpc(RpcCall("reload_weights", (str(tmp_path / "other"),)))
        # A request that waited for blocks goes on without them.
        finish(core, {})
        finish_moves(core)
        for _ in range(2):
            assert same(answers(core), of_other)
            finish_moves(core)
            assert core.reset_prefix_cache()
        core.scheduler.kv_cache.check_integrity()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.usefixtures("folder")
def test_random_schedules_while_blocks_are_removed(tmp_path: Path, tiers: str, seed: int) -> None:
    """Resets of all tiers, files that other engines remove, and blocks that may be wrong, in a tiny KV cache."""
    choose = random.Random(seed)
    prompts = branching_prompts(choose, seed)
    params = greedy(choose.randint(2, 10))
    with engine(tmp_path) as core:
        expected = [run(core, [prompt], params)[0].tokens for prompt in prompts]
    with engine(tmp_path, num_blocks=24, max_num_seqs=4, **options_of(tiers, tmp_path)) as core:
        side = scheduler_side(core, TierScheduling)

        def disturb() -> None:
            if choose.random() < 0.02:
                core.reset_prefix_cache(reset_connector=True)
            if choose.random() < 0.02:
                shutil.rmtree(tmp_path / "blocks" / choose.choice(["", "kv-1"]), ignore_errors=True)
            if choose.random() < 0.05 and (found := files(tmp_path / "blocks")):
                choose.choice(found).unlink(missing_ok=True)
            if choose.random() < 0.02:
                forget_blocks(core, choose.choice(prompts))
            if choose.random() < 0.3:
                side._saves.begin(is_paced=False)

        for _ in range(3):
            run_at_random(core, prompts, params, expected, choose, disturb)
        assert side._saves._paused_until == 0.0
        for _ in range(2):
            run_at_random(core, prompts, params, expected, choose)
            finish_moves(core)
            assert core.reset_prefix_cache()
        assert counter(core, "external_prefix_cache_hits") > 0
        assert not side._places.wrong


@pytest.mark.slow
def test_a_reset_of_engines_beside_each_other(folder: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": "8MiB", "data_parallel_size": 2}
    prompts = ["ROMEO:\n" + "What light through yonder window breaks? " * 6 + str(number) for number in range(6)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM("demo", kv_offload_dir=str(folder), kv_load_policy="always", **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        llm.save_prefix(prompts[0])
        assert files(folder)
        for is_of_all in (False, True):
            assert llm.reset_prefix_cache(reset_connector=is_of_all)
            assert bool(files(folder)) is not is_of_all
            outputs = llm.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert is_of_all or any(output.num_cached_tokens for output in outputs)
