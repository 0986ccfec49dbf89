"""Blocks of the KV cache in a folder: later engines load them, with the bits of those that compute everything."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError
from penstock.features.kv_files.files import TRAILER_BYTES, DamagedBlock, FolderLimit, read_block, write_block
from penstock.features.kv_files.folder import blocks_in
from penstock.features.kv_tiers.scheduling import TierScheduling
from penstock.scheduler.pace import Pace
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import add, finish, greedy, make_core, random_prompts, run
from support.features import scheduler_side
from support.kept_blocks import KINDS, PROMPTS, VOCAB, answers, branching_prompts, counter, files, same
from support.random_requests import run_at_random


@contextlib.contextmanager
def engine(model: Path, folder: Path | None, **options: Any) -> Iterator[EngineCore]:
    core = make_core(model, kv_offload_dir=folder and str(folder), **options)
    try:
        yield core
    finally:
        core.close()


_QUICK = ("full", "windows", "states")


@pytest.mark.parametrize(
    "case", [case if case in _QUICK else pytest.param(case, marks=pytest.mark.slow) for case in KINDS]
)
def test_a_new_engine_loads_what_an_earlier_one_computed(tmp_path: Path, folder: Path, case: str) -> None:
    family, options = KINDS[case]
    save_checkpoint(tiny_model(family), tmp_path / "model")
    with engine(tmp_path / "model", None, **options) as core:
        expected = answers(core)
    with engine(tmp_path / "model", folder, **options) as core:
        assert same(answers(core), expected)
    assert files(folder)
    with engine(tmp_path / "model", folder, **options) as core:
        assert same(answers(core), expected)
        assert counter(core, "external_prefix_cache_hits") > 100
        assert counter(core, "kv_tier_failed_loads") == 0
        # What was answered is found as well, in a next turn.
        turns = [[*prompt, *result.tokens, 5, 6] for prompt, result in zip(PROMPTS, expected, strict=True)]
        core.scheduler.kv_cache.check_integrity()
        again = answers(core, turns)
        core.scheduler.kv_cache.check_integrity()
    with engine(tmp_path / "model", None, **options) as core:
        assert same(answers(core, turns), again)


def test_blocks_that_a_small_cache_evicted_are_loaded_again(tmp_path: Path, folder: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    prompts = random_prompts([90] * 6, vocab_size=VOCAB)
    with engine(tmp_path / "model", None) as core:
        expected = [answers(core, [prompt])[0] for prompt in prompts]
    with engine(tmp_path / "model", folder, num_blocks=26, max_num_seqs=4) as core:
        # What the next prompt evicts is saved, however fast the steps are.
        scheduler_side(core, TierScheduling)._saves.keeps_pace = False
        for _ in range(3):
            for prompt, result in zip(prompts, expected, strict=True):
                assert same(answers(core, [prompt]), [result])
                core.scheduler.kv_cache.check_integrity()
        assert counter(core, "external_prefix_cache_hits") >= 2 * 80


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def test_a_core_without_requests_saves_and_releases_all_blocks(tmp_path: Path, folder: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model", folder) as core:
        # Requests end one after the other, and the last one while blocks are written.
        run(core, PROMPTS, [greedy(length) for length in (3, 6, 9, 12)])
        give_up_at = time.monotonic() + 30
        while core.scheduler.kv_cache.num_used_blocks and time.monotonic() < give_up_at:
            if core.has_unfinished_requests():
                core.step()
        assert not core.scheduler.kv_cache.num_used_blocks
        found = files(folder)
        assert len(found) >= 12
        assert (
            sum(path.stat().st_size for path in found)
            == counter(core, "kv_tier_saved_bytes") + len(found) * TRAILER_BYTES
        )


def test_a_core_that_ends_saves_more_blocks_than_it_holds_at_once(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.features.kv_tiers.saves._MOST_SAVES", 2)
    tiny_checkpoint(tmp_path / "model")
    prompts = random_prompts([100] * 3, vocab_size=VOCAB)
    with engine(tmp_path / "model", folder) as core:
        expected = answers(core, prompts)
        (kept,) = core.collective_rpc(RpcCall("save_kv_prefix", (prompts[0],)))
        assert kept[0] == 96
    with engine(tmp_path / "model", folder) as core:
        assert same(answers(core, prompts), expected)
        assert counter(core, "external_prefix_cache_hits") == 3 * 96


def test_saves_keep_to_their_share_of_the_steps(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.scheduler.pace._SHARE", 1e-9)
    tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model", folder) as core:
        for index, prompt in enumerate(PROMPTS):
            add(core, f"r{index}", prompt, greedy(12))
        while core.scheduler.has_unfinished_requests():
            core.step()
        assert not files(folder)
        give_up_at = time.monotonic() + 30
        while len(files(folder)) < 12 and time.monotonic() < give_up_at:
            core.step()
        assert len(files(folder)) >= 12


def test_the_pace_follows_the_cost() -> None:
    pace, now, used_s, num_saves = Pace(0.0, 32), 0.0, 0.0, 0
    # Steps of 30 ms, and saves of 0.4 ms.
    for _ in range(1000):
        now += 0.03
        begun = [pace.begin() for _ in range(pace.num_jobs(now))]
        assert sum(begun) <= 0.005 + 1e-9
        for expected_s in begun:
            pace.end(expected_s, 0.0004)
            used_s, num_saves = used_s + 0.0004, num_saves + 1
    assert used_s == pytest.approx(30 * 0.015, rel=0.05)
    # Saves that take longer than may be taken at once, which come one at a time.
    assert pace.num_jobs(now + 1.0) == 12
    pace.end(pace.begin(), 0.1)
    assert pace.num_jobs(now + 2.0) == 0
    assert pace.num_jobs(now + 20.0) == 1
    # Saves that take nothing from the steps.
    pace.end(pace.begin(), 0.0)
    assert pace.num_jobs(now + 20.1) == 32


@pytest.mark.parametrize("size", [4096, 8 * 4096, 5000, 512, 7])
@pytest.mark.parametrize(("offset", "keeps_in_memory"), [(0, False), (64, False), (0, True)])
def test_a_file_has_the_bytes_of_its_pages(tmp_path: Path, size: int, offset: int, keeps_in_memory: bool) -> None:
    rng = np.random.default_rng(size)
    memory = rng.integers(0, 256, 4 * size + 8192, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 4096 + offset :]
    pages = [memory[index * size : (index + 1) * size] for index in range(3)]
    path = str(tmp_path / "ab" / "block")
    assert write_block(path, pages, keeps_in_memory=keeps_in_memory) == 3 * size
    read = [np.zeros(size, dtype=np.uint8) for _ in pages]
    assert read_block(path, read) == 3 * size
    assert all((one == other).all() for one, other in zip(pages, read, strict=True))
    # Every bit counts, and so does the order of pages.
    content = Path(path).read_bytes()
    for position in rng.integers(0, len(content), 20):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(rng.integers(8))
        Path(path).write_bytes(damaged)
        with pytest.raises(DamagedBlock):
            read_block(path, read)
    Path(path).write_bytes(content[size : 2 * size] + content[:size] + content[2 * size :])
    with pytest.raises(DamagedBlock):
        read_block(path, read)


@pytest.mark.parametrize("damage", [_flip, _cut, _extend, _empty])
def test_damaged_files_are_computed_anew_and_removed(tmp_path: Path, folder: Path, damage: Any) -> None:
    tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model", folder) as core:
        expected = answers(core)
    damaged = sorted(files(folder))[::2]
    for path in damaged:
        damage(path)
    with engine(tmp_path / "model", folder) as core:
        assert same(answers(core), expected)
        assert counter(core, "kv_tier_failed_loads") > 0
    with engine(tmp_path / "model", folder) as core:
        assert same(answers(core), expected)
        assert counter(core, "kv_tier_failed_loads") == 0


def test_files_that_vanish_between_look_up_and_load(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model", folder) as core:
        expected = answers(core)
    with engine(tmp_path / "model", folder) as core:
        ask = TierScheduling._ask

        def vanish(side: TierScheduling) -> None:
            shutil.rmtree(folder / "kv-1", ignore_errors=True)
            ask(side)

        monkeypatch.setattr(TierScheduling, "_ask", vanish)
        assert same(answers(core), expected)
        core.scheduler.kv_cache.check_integrity()


def test_salts_and_other_weights_share_nothing(tmp_path: Path, folder: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    tiny_checkpoint(tmp_path / "other", seed=1)
    with engine(tmp_path / "model", folder) as core:
        add(core, "salted", PROMPTS[0], greedy(4), cache_salt="a")
        finish(core, {})
    with engine(tmp_path / "model", folder) as core:
        add(core, "plain", PROMPTS[0], greedy(4))
        add(core, "b", PROMPTS[0], greedy(4), cache_salt="b")
        finish(core, {})
        assert counter(core, "external_prefix_cache_hits") == 0
        add(core, "a", PROMPTS[0], greedy(4), cache_salt="a")
        finish(core, {})
        assert counter(core, "external_prefix_cache_hits") == 64
    with engine(tmp_path / "other", None) as core:
        expected = answers(core)
    with engine(tmp_path / "other", folder) as core:
        assert same(answers(core), expected)
        assert counter(core, "external_prefix_cache_hits") == 0


def test_weights_that_change_make_other_blocks(tmp_path: Path, folder: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    tiny_checkpoint(tmp_path / "other", seed=1)
    with engine(tmp_path / "other", None) as core:
        expected = answers(core)
    with engine(tmp_path / "model", folder) as core:
        first = answers(core)
        core.collective_rpc(RpcCall("reload_weights", (str(tmp_path / "other"),)))
        hits = counter(core, "external_prefix_cache_hits")
        assert same(answers(core), expected)
        assert counter(core, "external_prefix_cache_hits") == hits
    with engine(tmp_path / "model", folder) as core:
        assert same(answers(core), first)


def test_blocks_of_weights_that_this_process_alone_knows_are_removed(tmp_path: Path, folder: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    tiny_checkpoint(tmp_path / "other", seed=1)
    with engine(tmp_path / "model", folder) as core:
        answers(core)
        (of_start,) = blocks_in(folder)
        digests = set()
        for name in ("other", "model"):
            core.collective_rpc(RpcCall("reload_weights", (str(tmp_path / name),)))
            answers(core)
            core.collective_rpc(RpcCall("save_kv_prefix", (PROMPTS[0],)))
            others = [one for one in blocks_in(folder) if one.digest != of_start.digest]
            digests |= {one.digest for one in others}
            assert [one.num_blocks > 0 for one in others] == [True]
            assert others[0].about["weight_version"] > 0
        assert len(digests) == 2
    assert [one.digest for one in blocks_in(folder)] == [of_start.digest]


def test_a_reset_of_the_connector_empties_the_folder(tmp_path: Path, folder: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    tiny_checkpoint(tmp_path / "other", seed=1)
    with engine(tmp_path / "other", folder) as core:
        answers(core)
    (of_other,) = blocks_in(folder)
    with engine(tmp_path / "model", folder) as core:
        expected = answers(core)
        core.collective_rpc(RpcCall("save_kv_prefix", (PROMPTS[0],)))
        assert len(blocks_in(folder)) == 2
        assert core.reset_prefix_cache()
        assert same(answers(core), expected)
        assert counter(core, "external_prefix_cache_hits") > 100
        assert core.reset_prefix_cache(reset_connector=True)
        # Blocks of other models stay.
        assert [one.digest for one in blocks_in(folder)] == [of_other.digest]
        hits = counter(core, "external_prefix_cache_hits")
        assert same(answers(core), expected)
        assert counter(core, "external_prefix_cache_hits") == hits
    # Blocks that are computed afterwards are kept, and belong to their model.
    assert {one.digest: one.model for one in blocks_in(folder)}.keys() > {of_other.digest}
    assert all(one.model != "?" for one in blocks_in(folder))
    with engine(tmp_path / "model", folder) as core:
        assert same(answers(core), expected)
        assert counter(core, "external_prefix_cache_hits") > 100


def test_a_folder_that_cannot_be_emptied_is_no_success(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model", folder) as core:
        answers(core)
        core.collective_rpc(RpcCall("save_kv_prefix", (PROMPTS[0],)))
        with monkeypatch.context() as patched:
            patched.setattr("penstock.features.kv_files.files.os.unlink", _refuses)
            assert not core.reset_prefix_cache(reset_connector=True)
        assert core.reset_prefix_cache(reset_connector=True)


def test_a_folder_keeps_to_its_limit(tmp_path: Path, folder: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    with engine(tmp_path / "model", folder) as core:
        expected = answers(core)
    one = files(folder)[0].stat().st_size
    before = len(files(folder))
    (folder / "kv-1" / "ab-0123.part").write_bytes(b"unfinished")
    limit = FolderLimit(folder, 4 * one)
    limit.enforce()
    limit.close()
    kept = [path for path in files(folder) if path.suffix != ".part"]
    assert 0 < len(kept) <= 4 < before
    with engine(tmp_path / "model", folder) as core:
        assert same(answers(core), expected)


def test_a_full_file_system_stops_saving_and_nothing_else(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_checkpoint(tmp_path / "model")
    monkeypatch.setattr("penstock.features.kv_files.files.os.writev", _no_space)
    with engine(tmp_path / "model", folder) as core:
        answers(core)
        core.scheduler.kv_cache.check_integrity()
        assert core.reset_prefix_cache()
    assert not files(folder)
    assert caplog.text.count("No blocks of the KV cache are saved for 60 s: OSError: [Errno 28]") == 1


def _refuses(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def _no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_random_schedules_in_a_small_cache(tmp_path: Path, folder: Path, case: str, seed: int) -> None:
    """Requests that come, end and are aborted at random, with common prefixes, preemption and resets."""
    family, options = KINDS[case]
    save_checkpoint(tiny_model(family), tmp_path / "model")
    choose = random.Random(seed)
    prompts = branching_prompts(choose, seed)
    params = greedy(choose.randint(2, 10))
    with engine(tmp_path / "model", None, **options) as core:
        expected = [run(core, [prompt], params)[0].tokens for prompt in prompts]
    with engine(tmp_path / "model", folder, num_blocks=24, max_num_seqs=4, **options) as core:
        for _ in range(3):
            run_at_random(core, prompts, params, expected, choose)
    assert files(folder)
    with engine(tmp_path / "model", folder, num_blocks=24, max_num_seqs=4, **options) as core:
        run_at_random(core, prompts, params, expected, choose)
        assert counter(core, "external_prefix_cache_hits") > 0 or case == "states"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload_dir": "/nowhere/at/all"}, "kv_offload_dir='/nowhere/at/all' is not a folder"),
        ({"kv_offload_dir": ""}, "kv_offload_dir='' is not valid. Allowed: the path of a folder"),
        ({"kv_offload_dir": 5}, "kv_offload_dir=5 is not valid. Allowed: the path of a folder"),
        ({"kv_offload_dir": ".", "kv_offload_dir_size": 1e-8}, "a block of the KV cache takes .* Raise it"),
        ({"kv_offload_dir": ".", "enable_prefix_caching": False}, "with enable_prefix_caching=False"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_core(tmp_path, **options)
