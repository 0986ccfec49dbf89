"""Blocks in a folder are loaded or computed, whichever is expected to be sooner, and before their requests' turn."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.kv_tiers import KVTierConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.replay import replay
from penstock.errors import ConfigError
from penstock.features.kv_tiers.choice import LoadBytes, LoadChoice
from penstock.features.kv_tiers.scheduling import TierScheduling
from penstock.features.kv_tiers.worker import TierWorker
from penstock.scheduler.measured_costs import ComputeTimes
from support.checkpoints import tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run
from support.features import scheduler_side
from support.kept_blocks import counter

VOCAB = 97
PROMPTS = random_prompts([97, 90, 81, 70], vocab_size=VOCAB)
# Tokens of whole blocks before the last token.
NUM_KEPT = 96 + 80 + 80 + 64
LONG = random_prompts([20], vocab_size=VOCAB, seed=1)[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "model")
    return tmp_path / "model"


@contextlib.contextmanager
def engine(model: Path, folder: Path, **options: Any) -> Iterator[EngineCore]:
    core = make_core(model, kv_offload_dir=str(folder), **options)
    try:
        yield core
    finally:
        core.close()


@pytest.fixture
def expected(model: Path, folder: Path) -> list[Result]:
    """Answers of an engine that fills the folder."""
    with engine(model, folder) as core:
        return run(core, PROMPTS, greedy(6))


def side_of(core: EngineCore) -> TierScheduling:
    return scheduler_side(core, TierScheduling)


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


# Choice of loading or computing.


def choice(times: ComputeTimes | None, model: Path, folder: Path) -> LoadChoice:
    with engine(model, folder) as core:
        return LoadChoice(core.scheduler.kv_cache.config, times)


class Times(ComputeTimes):
    """A token takes a second, and one for each thousand before it."""

    def seconds(self, first: int, num_tokens: int) -> float | None:
        return num_tokens * (1.0 + first / 1000.0)


def test_what_is_sooner_depends_on_bytes_and_on_the_tokens_before(model: Path, folder: Path) -> None:
    one = choice(Times(), model, folder)
    assert not one.is_sooner_computed(0, 1, LoadBytes(0, 1 << 40))  # no load was measured
    for num_bytes in (1000, 2000, 4000):
        one.note_load(LoadBytes(0, num_bytes), 5.0 + num_bytes / 100.0)
        one.note_load(LoadBytes(num_bytes, 0), 5.0)
    assert one.is_sooner_computed(0, 10, LoadBytes(0, 1000))
    assert not one.is_sooner_computed(0, 10, LoadBytes(1000, 0))
    assert not one.is_sooner_computed(0, 20, LoadBytes(0, 1000))
    assert not one.is_sooner_computed(9000, 5, LoadBytes(0, 1000))
    assert one.is_sooner_computed(9000, 5, LoadBytes(0, 10000))
    always = choice(None, model, folder)
    always.note_load(LoadBytes(0, 1000), 100.0)
    assert not always.is_sooner_computed(0, 1, LoadBytes(0, 1 << 40))


def test_bytes_are_those_of_a_blocks_pages_on_a_rank(model: Path, folder: Path, expected: list[Result]) -> None:
    with engine(model, folder) as core:
        run(core, PROMPTS, greedy(1))
        side = side_of(core)
        num_bytes = side._choice.num_bytes([((0, b""), False)] * (NUM_KEPT // 16))
        assert num_bytes.from_folder == counter(core, "kv_tier_loaded_bytes")


@pytest.mark.parametrize("is_slow", [False, True])
def test_measured_costs_decide(model: Path, folder: Path, expected: list[Result], is_slow: bool) -> None:
    """Steps are measured as they are; loads as if they took days, or almost no time."""
    with engine(model, folder, max_num_batched_tokens=256) as core:
        others = random_prompts([120, 110], vocab_size=VOCAB, seed=2)
        run(core, others, greedy(2))
        for _ in range(32):
            side_of(core)._choice.note_load(LoadBytes(0, 1 << 20), 1e5 if is_slow else 1e-9)
        assert tokens(run(core, PROMPTS, greedy(6))) == tokens(expected)
        assert counter(core, "kv_tier_recomputed_tokens") == (NUM_KEPT if is_slow else 0)
        assert counter(core, "external_prefix_cache_hits") == (0 if is_slow else NUM_KEPT)
    with engine(model, folder, max_num_batched_tokens=256, kv_load_policy="always") as core:
        run(core, others, greedy(2))
        for _ in range(32):
            side_of(core)._choice.note_load(LoadBytes(0, 1 << 20), 1e5)
        assert tokens(run(core, PROMPTS, greedy(6))) == tokens(expected)
        assert counter(core, "external_prefix_cache_hits") >= NUM_KEPT


def test_a_recording_holds_what_was_chosen(
    model: Path, folder: Path, expected: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay runs what was recorded, whatever takes how long there."""
    choices = itertools.cycle([True, False])
    monkeypatch.setattr(LoadChoice, "is_sooner_computed", lambda *_: next(choices))
    file = tmp_path / "steps.rec"
    with engine(model, folder, record=str(file), record_prompts=True) as core:
        assert tokens(run(core, PROMPTS, greedy(6))) == tokens(expected)
        computed, loaded = counter(core, "kv_tier_recomputed_tokens"), counter(core, "external_prefix_cache_hits")
        assert computed > 0
        assert loaded > 0
        assert computed + loaded == NUM_KEPT
    monkeypatch.setattr(LoadChoice, "is_sooner_computed", lambda *_: False)
    report = replay(file, model=str(model))
    assert report.num_compared > 0
    assert not report.differences, report


def test_the_policy_is_checked() -> None:
    with pytest.raises(ConfigError, match="kv_load_policy='never' is not valid. Allowed: 'faster', 'always'"):
        KVTierConfig(kv_load_policy="never")


# Loads before a request's turn.


def steps_until(core: EngineCore, results: dict[str, Result], is_reached: Any) -> None:
    for _ in range(200):
        if is_reached():
            return
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
        side_of(core)._finish()
    raise AssertionError("it is never reached")


def test_requests_that_wait_for_others_are_loaded_meanwhile(model: Path, folder: Path, expected: list[Result]) -> None:
    with engine(model, folder, max_num_seqs=1) as core:
        results: dict[str, Result] = {}
        add(core, "long", LONG, greedy(100))
        for index, prompt in enumerate(PROMPTS):
            add(core, f"r{index}", prompt, greedy(6))
        steps_until(core, results, lambda: counter(core, "external_prefix_cache_hits") == NUM_KEPT)
        assert core.scheduler.num_running == 1
        assert core.scheduler.num_waiting == len(PROMPTS)
        assert results["long"].finish_reason is None
        finish(core, results)
        assert tokens([results[f"r{index}"] for index in range(len(PROMPTS))]) == tokens(expected)
        assert [results[f"r{index}"].num_cached_tokens for index in range(len(PROMPTS))] == [96, 80, 80, 64]
        # Each was looked up for all its tokens, once.
        num_queries = len(LONG) + sum(map(len, PROMPTS))
        assert counter(core, "external_prefix_cache_queries") == num_queries
        core.scheduler.kv_cache.check_integrity()


class Gate:
    """Keeps the workers' moves waiting until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._event = threading.Event()
        move = TierWorker._move

        def waiting(side: TierWorker, *arguments: Any) -> None:
            assert self._event.wait(60)
            move(side, *arguments)

        monkeypatch.setattr(TierWorker, "_move", waiting)

    def open(self) -> None:
        self._event.set()


@pytest.fixture
def gate(expected: list[Result], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def num_loading(core: EngineCore) -> int:
    """Blocks that are being loaded."""
    return len(side_of(core)._loads)


def some_steps(core: EngineCore, results: dict[str, Result]) -> None:
    for _ in range(12):
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)


def test_loads_ahead_take_half_of_the_free_blocks_at_most(model: Path, folder: Path, gate: Gate) -> None:
    with engine(model, folder, max_num_seqs=1, num_blocks=30) as core:
        results: dict[str, Result] = {}
        add(core, "long", LONG, greedy(60))
        for index, prompt in enumerate(PROMPTS):
            add(core, f"r{index}", prompt, greedy(6))
        some_steps(core, results)
        # Of 27 free blocks 6 are taken. Of the 21 others, 5 more would be too many for the next two, but 4 are not.
        assert num_loading(core) == 6 + 4
        gate.open()
        finish(core, results)
        core.scheduler.kv_cache.check_integrity()
        assert results["long"].num_preemptions == 0


def test_loads_ahead_begin_while_few_bytes_are_in_transfer(
    model: Path, folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.features.kv_tiers.scheduling._MOST_AHEAD_BYTES", 1)
    with engine(model, folder, max_num_seqs=1) as core:
        results: dict[str, Result] = {}
        add(core, "long", LONG, greedy(60))
        for index, prompt in enumerate(PROMPTS):
            add(core, f"r{index}", prompt, greedy(6))
        some_steps(core, results)
        assert num_loading(core) == 6
        gate.open()
        finish(core, results)
        assert counter(core, "external_prefix_cache_hits") == NUM_KEPT


def test_an_aborted_request_is_not_loaded_and_another_one_is(
    model: Path, folder: Path, expected: list[Result], gate: Gate
) -> None:
    with engine(model, folder, max_num_seqs=1) as core:
        results: dict[str, Result] = {}
        add(core, "long", LONG, greedy(100))
        add(core, "aborted", PROMPTS[0], greedy(6))
        some_steps(core, results)
        assert num_loading(core) == 6
        core.abort_requests(["aborted"])
        # The same prompt again, while the moves of the first request are still taken back.
        add(core, "r0", PROMPTS[0], greedy(6))
        side_of(core).after_step()
        gate.open()
        finish(core, results)
        assert results["r0"].tokens == expected[0].tokens
        assert results["r0"].num_cached_tokens == 96
        # Two moves were being done; the other four are not.
        block_bytes = side_of(core)._choice.num_bytes([((0, b""), False)]).total
        assert counter(core, "kv_tier_loaded_bytes") == (2 + 6) * block_bytes
        assert counter(core, "kv_tier_failed_loads") == 0
        core.scheduler.kv_cache.check_integrity()
        side_of(core)._finish()
        assert not core.scheduler.kv_cache.single_blocks.num_holders


def test_blocks_that_were_evicted_before_their_turn_are_loaded_again(
    model: Path, folder: Path, expected: list[Result]
) -> None:
    with engine(model, folder, max_num_seqs=1) as core:
        results: dict[str, Result] = {}
        add(core, "long", LONG, greedy(40))
        add(core, "r0", PROMPTS[0], greedy(6))
        steps_until(core, results, lambda: counter(core, "external_prefix_cache_hits") == 96)
        for pool in core.scheduler.kv_cache.pools:
            pool.forget_content(pool.blocks[1:])
        finish(core, results)
        assert results["r0"].tokens == expected[0].tokens
        assert results["r0"].num_cached_tokens == 96
        assert counter(core, "external_prefix_cache_hits") == 2 * 96
