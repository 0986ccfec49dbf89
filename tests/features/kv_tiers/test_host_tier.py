"""Blocks in host memory: what left the KV cache comes back with the bits of what is computed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.contract import RpcCall
from penstock.device.limits import memory_limit
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.planning.plan import plan_engine
from penstock.errors import ConfigError, InvalidRequest, OutOfMemory, UnsupportedArgument
from penstock.features.kv_tiers.host_blocks import HostBlock, HostBlocks
from penstock.features.kv_tiers.moves import HostLayout
from penstock.features.kv_tiers.scheduling import TierScheduling
from support.arrangements import PARAMS, VOCAB_SIZE, assert_same, some_steps
from support.arrangements import PROMPTS as MANY_PROMPTS
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import SMALL, Result, add, bytes_of_blocks, finish, greedy, make_core, random_prompts, run
from support.features import scheduler_side
from support.kept_blocks import KINDS, PROMPTS, VOCAB, answers, branching_prompts, counter, files, same
from support.random_requests import run_at_random

GIB = 1 << 30


@contextlib.contextmanager
def engine(model: Path, host_bytes: int | None = 16 << 20, **options: Any) -> Iterator[EngineCore]:
    if host_bytes is not None:
        options |= {"kv_offloading_size": host_bytes / GIB, "kv_load_policy": "always"}
    core = make_core(model, **options)
    try:
        yield core
    finally:
        core.close()


def finish_saves(core: EngineCore) -> None:
    side = scheduler_side(core, TierScheduling)
    give_up_at = time.monotonic() + 30
    while side._saves.fresh or side._is_busy:
        assert time.monotonic() < give_up_at, "blocks are still being saved"
        core.step()
        time.sleep(0.001)


_QUICK = ("full", "windows", "states", "int8-cache")


@pytest.mark.parametrize(
    "case", [case if case in _QUICK else pytest.param(case, marks=pytest.mark.slow) for case in KINDS]
)
def test_blocks_that_left_the_kv_cache_come_back(tmp_path: Path, case: str) -> None:
    family, options = KINDS[case]
    save_checkpoint(tiny_model(family), tmp_path / "model")
    with engine(tmp_path / "model", None, **options) as core:
        expected = answers(core)
    with engine(tmp_path / "model", **options) as core:
        assert same(answers(core), expected)
        finish_saves(core)
        assert core.reset_prefix_cache()
        assert same(answers(core), expected)
        assert counter(core, "kv_host_hits") == counter(core, "external_prefix_cache_hits") > 100
        assert 0 < counter(core, "kv_host_loaded_bytes") <= counter(core, "kv_host_saved_bytes")
        assert counter(core, "kv_tier_failed_loads") == 0
        core.scheduler.kv_cache.check_integrity()
        # Nothing is found once all tiers are reset.
        finish_saves(core)
        hits = counter(core, "kv_host_hits")
        assert core.reset_prefix_cache(reset_connector=True)
        assert same(answers(core), expected)
        assert counter(core, "kv_host_hits") == hits


def test_a_small_kv_cache_has_a_larger_one_behind_it(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    prompts = random_prompts([90] * 6, vocab_size=VOCAB)
    with engine(tmp_path / "model", None) as core:
        expected = [answers(core, [prompt])[0] for prompt in prompts]
    with engine(tmp_path / "model", num_blocks=26, max_num_seqs=4) as core:
        for _ in range(3):
            for prompt, result in zip(prompts, expected, strict=True):
                assert same(answers(core, [prompt]), [result])
                core.scheduler.kv_cache.check_integrity()
                finish_saves(core)
        assert counter(core, "kv_host_hits") >= 2 * 80


def test_preempted_requests_find_their_blocks_again(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    prompts = random_prompts([60] * 4, vocab_size=VOCAB)
    with engine(tmp_path / "model", None) as core:
        expected = answers(core, prompts, max_tokens=60)
    with engine(tmp_path / "model", num_blocks=22, max_num_seqs=4) as core:
        side = scheduler_side(core, TierScheduling)
        for index, prompt in enumerate(prompts):
            add(core, f"r{index}", prompt, greedy(60, logprobs=2))
        results: dict[str, Result] = {}
        while core.has_unfinished_requests():
            for output in core.step():
                results.setdefault(output.req_id, Result()).take(output)
            # However long saves take beside the steps.
            side._save_all()
        found = [results[f"r{index}"] for index in range(len(prompts))]
        assert same(found, expected)
        assert sum(result.num_preemptions for result in found) > 0
        assert counter(core, "kv_host_loaded_bytes") > 0
        core.scheduler.kv_cache.check_integrity()


def test_blocks_go_on_to_the_folder_and_come_from_the_first_tier_that_has_them(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    (tmp_path / "blocks").mkdir()
    options = {"kv_offload_dir": str(tmp_path / "blocks")}
    with engine(tmp_path / "model", **options) as core:
        expected = answers(core)
        finish_saves(core)
        assert counter(core, "kv_tier_saved_bytes") == counter(core, "kv_host_saved_bytes") > 0
        assert core.reset_prefix_cache()
        assert same(answers(core), expected)
        assert counter(core, "kv_host_loaded_bytes") > 0
        assert counter(core, "kv_tier_loaded_bytes") == 0
    assert len(files(tmp_path / "blocks")) > 10
    with engine(tmp_path / "model", **options) as core:
        assert same(answers(core), expected)
        hits = counter(core, "external_prefix_cache_hits")
        assert counter(core, "kv_tier_loaded_bytes") > 0
        assert counter(core, "kv_host_hits") == 0
        assert counter(core, "kv_folder_hits") == hits
        # What came from the folder is in host memory from then on.
        finish_saves(core)
        assert core.reset_prefix_cache()
        assert same(answers(core), expected)
        assert counter(core, "kv_host_hits") == hits > 100
        assert counter(core, "kv_folder_hits") == hits
        assert counter(core, "kv_peer_queries") == counter(core, "kv_peer_hits") == 0
        queries = counter(core, "external_prefix_cache_queries")
        assert counter(core, "kv_host_queries") == counter(core, "kv_folder_queries") == queries


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_random_schedules_with_little_of_both(tmp_path: Path, case: str, seed: int) -> None:
    """Requests that come, end and are aborted at random; host memory and the KV cache both have to make room."""
    family, options = KINDS[case]
    save_checkpoint(tiny_model(family), tmp_path / "model")
    (tmp_path / "blocks").mkdir()
    choose = random.Random(seed)
    prompts = branching_prompts(choose, seed)
    params = greedy(choose.randint(2, 10))
    with engine(tmp_path / "model", None, **options) as core:
        expected = [run(core, [prompt], params)[0].tokens for prompt in prompts]
    if seed % 2:
        options = {**options, "kv_offload_dir": str(tmp_path / "blocks")}
    host_bytes = bytes_of_blocks(tmp_path / "model", 15, **KINDS[case][1])
    with engine(tmp_path / "model", host_bytes, num_blocks=24, max_num_seqs=4, **options) as core:
        scheduler_side(core, TierScheduling)._saves.keeps_pace = False
        for _ in range(4):
            run_at_random(core, prompts, params, expected, choose)
            finish_saves(core)
        assert counter(core, "kv_host_saved_bytes") > 0


def test_blocks_of_host_memory_share_no_piece() -> None:
    """Blocks that are written, read, forgotten and evicted at random, beside a list of what each piece has."""
    choose = random.Random(0)
    blocks = HostBlocks([HostLayout(40, (3, 1, 7)), HostLayout(41, (3, 2, 7))])
    used: dict[HostBlock, int] = {}
    for step in range(4000):
        key = choose.randrange(3), bytes([choose.randrange(30)])
        action = choose.random()
        found = blocks.find(key)
        if action < 0.4 and blocks.lacks(key):
            block = blocks.add(key)
            if block is not None:
                assert len(block.pieces) == (3, 2, 7)[key[0]]
                used[block] = 1
        elif action < 0.6 and found is not None:
            blocks.use(found)
            used[found] = used.get(found, 0) + 1
        elif action < 0.9 and used:
            block = choose.choice(list(used))
            block.is_whole = True
            blocks.release(block)
            used[block] -= 1
            if not used[block]:
                del used[block]
        elif action < 0.95:
            blocks.forget(key)
        elif action < 0.96:
            blocks.clear()
        taken = [piece for block in {*blocks._blocks.values(), *used} for piece in block.pieces]
        assert len(taken) == len(set(taken)) <= 40, step
        assert set(taken) <= set(range(40))
    for block in list(used):
        for _ in range(used[block]):
            blocks.release(block)
    blocks.clear()
    assert blocks._room == 40


def test_the_least_recently_used_block_makes_room() -> None:
    blocks = HostBlocks([HostLayout(4, (1,))])
    keys = [(0, bytes([number])) for number in range(6)]
    for key in keys[:4]:
        block = blocks.add(key)
        assert block is not None
        block.is_whole = True
        blocks.release(block)
    blocks.refresh([keys[0]])
    first = blocks.find(keys[1])
    assert first is not None
    blocks.use(first)
    assert blocks.add(keys[4]) is not None
    assert blocks.add(keys[5]) is not None
    assert [blocks.find(key) is not None for key in keys[:4]] == [True, True, False, False]
    assert blocks.add((0, b"another")) is not None
    assert blocks.find(keys[0]) is None
    # All others are in use.
    assert blocks.add((0, b"one more")) is None
    assert blocks.find(keys[1]) is first


def test_blocks_survive_a_sleep_and_no_change_of_the_weights(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    tiny_checkpoint(tmp_path / "other", seed=1)
    with engine(tmp_path / "other", None) as core:
        of_others = answers(core)
    with engine(tmp_path / "model") as core:
        expected = answers(core)
        finish_saves(core)
        core.collective_rpc(RpcCall("sleep"))
        core.collective_rpc(RpcCall("wake_up"))
        assert same(answers(core), expected)
        hits = counter(core, "kv_host_hits")
        assert hits > 100
        finish_saves(core)
        core.collective_rpc(RpcCall("reload_weights", (str(tmp_path / "other"),)))
        assert same(answers(core), of_others)
        assert counter(core, "kv_host_hits") == hits
        # Those of the new weights are kept in turn.
        finish_saves(core)
        assert core.reset_prefix_cache()
        assert same(answers(core), of_others)
        assert counter(core, "kv_host_hits") > hits


def test_salts_are_kept_apart(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model") as core:
        for name, salt, num_hits in (("first", "a", 0), ("other", "b", 0), ("none", None, 0), ("again", "a", 64)):
            before = counter(core, "kv_host_hits")
            add(core, name, PROMPTS[0], greedy(4), cache_salt=salt)
            finish(core, {})
            assert counter(core, "kv_host_hits") - before == num_hits
            finish_saves(core)
            assert core.reset_prefix_cache()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_each_rank_keeps_its_share_and_is_killed(tmp_path: Path, ranks: str) -> None:
    tiny_checkpoint(tmp_path / "model", vocab_size=VOCAB_SIZE)
    with engine(tmp_path / "model", None, max_model_len=128) as core:
        undisturbed = run(core, MANY_PROMPTS, PARAMS)
    with engine(tmp_path / "model", max_model_len=128, num_threads=2, **{ranks: 2}) as core:
        assert_same(run(core, MANY_PROMPTS, PARAMS), undisturbed)
        for victim in (0, 1):
            finish_saves(core)
            assert core.reset_prefix_cache()
            hits = counter(core, "kv_host_hits")
            assert_same(run(core, MANY_PROMPTS, PARAMS), undisturbed)
            assert counter(core, "kv_host_hits") > hits
            results = some_steps(core)
            os.kill(core._executor.process_ids[victim], signal.SIGKILL)  # type: ignore[attr-defined]
            finish(core, results)
            assert_same([results[f"r{index}"] for index in range(len(MANY_PROMPTS))], undisturbed)
            core.scheduler.kv_cache.check_integrity()


def test_memory_is_in_the_plan(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    (stage,) = plan_engine(tmp_path, **SMALL, kv_offloading_size=0.25).stages
    assert stage.memory["kv_offloading_size"] == GIB // 4
    assert "kv_offloading_size" in stage.memory.table()
    with pytest.raises(OutOfMemory, match=r"kv_offloading_size=1e\+06 asks for .* of host memory beside 4.00 MiB of"):
        plan_engine(tmp_path, **SMALL, kv_offloading_size=1e6)
    with pytest.raises(OutOfMemory, match=r"asks for .* of host memory"):
        make_core(tmp_path, kv_offloading_size=1e6)
    # Each of the two would fit.
    size = int(0.6 * memory_limit().free_bytes)
    with pytest.raises(OutOfMemory, match=r"asks for .* of host memory beside .* of kv_cache_memory_bytes"):
        plan_engine(tmp_path, **{**SMALL, "kv_cache_memory_bytes": size}, kv_offloading_size=size / GIB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_offloading_size": 0},
            "kv_offloading_size=0 is not valid. Allowed: a number of GiB from 1e-09 to 1e\\+09",
        ),
        ({"kv_offloading_size": 1e-6}, "a block of the KV cache takes .* Raise it"),
        ({"kv_offloading_size": 0.01, "enable_prefix_caching": False}, "with enable_prefix_caching=False"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_core(tmp_path, **options)


def test_neighbours_of_the_option_are_understood_or_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    make_core(tmp_path, kv_offloading_size=0.01, kv_offloading_backend="native", cpu_offload_gb=0).close()
    with pytest.raises(UnsupportedArgument, match="backend='lmcache' asks for KV cache blocks in LMCache"):
        make_core(tmp_path, kv_offloading_backend="lmcache")
    with pytest.raises(UnsupportedArgument, match="offload_group_size=4 asks for weights in host memory"):
        make_core(tmp_path, offload_group_size=4)


def test_prefixes_are_saved_in_folders_alone() -> None:
    with LLM("demo", kv_offloading_size=0.01) as llm, pytest.raises(InvalidRequest, match="kv_offload_dir=FOLDER"):
        llm.save_prefix("ROMEO:")
