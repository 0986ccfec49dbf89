"""A recurrent layer as a plugin, with a state of 1 MiB in pages of its own size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.plugins import CIRCUMSTANCES, assert_equal, install_plugin, running_sum, write_checkpoint
from penstock.contract import KVCacheConfig, KVCacheSpec, RecurrentStateSpec, RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.planning.plan import plan_engine
from penstock.engine.replay import replay
from penstock.errors import UnsupportedFeature
from penstock.scheduler.kv_cache_plan import group_layers, make_kv_cache_config
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.disturbed_workers import FailingWorker
from support.engines import SMALL, Result, add, finish, greedy, make_core, random_prompts, run
from support.padded_attention import PaddedBackend, use_graphs

PROMPTS = random_prompts((5, 37, 1, 30, 13, 22), VOCAB_SIZE, seed=3)
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 64, "kv_cache_memory_bytes": 150 << 20}
NGRAM = CIRCUMSTANCES[-1]
PARAMS = greedy(16, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    running_sum.register()
    return write_checkpoint(tmp_path_factory.mktemp("recurrent"), running_sum.ARCHITECTURE)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Result]:
    """Each request by itself, in one chunk, layer by layer."""
    core = make_core(folder, **OPTIONS, fast_paths="off", enable_prefix_caching=False)
    try:
        return [run(core, [prompt], PARAMS)[0] for prompt in PROMPTS]
    finally:
        core.close()


def core_with_pools(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_states: int, num_blocks: int, **options: Any
) -> EngineCore:
    """An engine whose KV cache has so many states, and so many blocks of attention."""

    def sized(_: Any, specs: dict[str, KVCacheSpec], *others: Any) -> KVCacheConfig:
        groups = group_layers(specs)
        counts = {
            group.pool: num_states if isinstance(group.spec, RecurrentStateSpec) else num_blocks for group in groups
        }
        return make_kv_cache_config(groups, [counts[pool] for pool in sorted(counts)])

    monkeypatch.setattr("penstock.engine.core.startup.size_kv_cache", sized)
    return make_core(folder, **{**OPTIONS, **options})


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"max_num_batched_tokens": 7}, NGRAM], ids=str)
@pytest.mark.each_value_quick
def test_tokens_and_bits_are_those_of_requests_alone(
    folder: Path, alone: list[Result], options: dict[str, Any]
) -> None:
    core = make_core(folder, **OPTIONS, **options)
    assert_equal(run(core, PROMPTS, PARAMS), alone)
    # Once more, from snapshots: those of the prompts' chunks, and those that a chat goes on from.
    assert_equal(run(core, PROMPTS, PARAMS), alone)
    if "speculative_config" in options:
        metrics = core.scheduler.spec_decode_metrics
        assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    core.close()


@pytest.mark.parametrize(("num_states", "num_blocks"), [(50, 24), (15, 60), (13, 24)])
@pytest.mark.parametrize("options", [{}, NGRAM, {"max_num_batched_tokens": 7, **NGRAM}], ids=str)
@pytest.mark.each_value_quick
def test_pools_that_are_too_small_for_all_requests_change_no_bit(
    folder: Path,
    alone: list[Result],
    monkeypatch: pytest.MonkeyPatch,
    num_states: int,
    num_blocks: int,
    options: dict[str, Any],
) -> None:
    core = core_with_pools(folder, monkeypatch, num_states, num_blocks, **options)
    for _ in range(2):
        assert_equal(run(core, PROMPTS, PARAMS), alone)
    if num_blocks < 30 and num_states > 30:
        assert core.scheduler.num_preemptions > 0
    core.scheduler.kv_cache.check_integrity()
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()


@pytest.mark.parametrize("options", [{}, NGRAM], ids=str)
@pytest.mark.each_value_quick
def test_a_request_goes_on_from_the_deepest_snapshot_of_its_prefix(folder: Path, options: dict[str, Any]) -> None:
    prompt = PROMPTS[1]
    # Chunks of 15 tokens leave snapshots at 12, 28 and 36, the last border before the last token.
    core = make_core(folder, **OPTIONS, **options, max_num_batched_tokens=15)
    prompts = [prompt, [*prompt, 7, 8, 9], [*prompt[:35], 7, 8], [*prompt[:13], 7, 8]]
    first = [run(core, [one], PARAMS)[0] for one in prompts[:1]]
    found = [run(core, [one], PARAMS)[0] for one in prompts]
    assert [result.num_cached_tokens for result in found] == [36, 36, 28, 12]
    assert core.scheduler.reset_prefix_cache()
    anew = run(core, prompts, PARAMS)
    core.close()
    assert_equal(found, anew)
    assert_equal(first, anew[:1])


@pytest.mark.parametrize("options", [{}, NGRAM], ids=str)
@pytest.mark.one_case_quick
def test_with_a_snapshot_in_each_block_hits_at_every_depth_change_no_bit(folder: Path, options: dict[str, Any]) -> None:
    prompt, params = PROMPTS[1], greedy(4, logprobs=2)
    core = make_core(folder, **OPTIONS, **options, max_num_seqs=2, mamba_cache_mode="all")
    prompts = [[*prompt[:length], 3] for length in range(1, 37, 3)]
    run(core, [prompt], params)
    found = run(core, prompts, params)
    assert [result.num_cached_tokens for result in found] == [(len(prompt) - 1) // 4 * 4 for prompt in prompts]
    assert core.scheduler.reset_prefix_cache()
    anew = [run(core, [prompt], params)[0] for prompt in reversed(prompts)]
    core.close()
    assert_equal(found, anew[::-1])


def test_snapshots_may_be_further_apart_than_blocks(folder: Path, alone: list[Result]) -> None:
    core = make_core(folder, **OPTIONS, mamba_cache_mode="all", mamba_block_size=8)
    for _ in range(2):
        results = run(core, PROMPTS, PARAMS)
        assert_equal(results, alone)
    assert [result.num_cached_tokens for result in results] == [(len(prompt) - 1) // 8 * 8 for prompt in PROMPTS]
    core.close()


def test_prefixes_of_another_salt_are_not_found(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    found = []
    for number, salt in enumerate((None, "a", None, "a", "b")):
        results: dict[str, Result] = {}
        add(core, f"{number}", PROMPTS[1], greedy(4), cache_salt=salt)
        finish(core, results)
        found.append(results[f"{number}"])
    core.close()
    assert [result.num_cached_tokens for result in found] == [0, 0, 36, 36, 0]
    assert len({tuple(result.tokens) for result in found}) == 1


def test_a_plan_shows_states_and_snapshots_apart(folder: Path) -> None:
    plan = plan_engine(folder, **{**SMALL, **OPTIONS})
    lines = [line.split() for line in plan.table().splitlines()]
    assert any(line[:1] == ["blocks"] and line[2:5] == ["of", "4", "tokens,"] for line in lines)
    (states,) = [int(line[1]) for line in lines if line[:1] == ["states"]]
    (snapshots,) = [int(line[1]) for line in lines if line[:1] == ["snapshots"]]
    assert snapshots == plan.to_dict()["kv_cache"]["num_snapshots"] == states - 1 - SMALL["max_num_seqs"] > 0
    without = plan_engine(folder, **{**SMALL, **OPTIONS}, mamba_cache_mode="none")
    assert "snapshots" not in without.table()


def test_without_snapshots_nothing_is_found_and_the_log_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    core = make_core(folder, **OPTIONS, mamba_cache_mode="none")
    for _ in range(2):
        assert [result.num_cached_tokens for result in run(core, PROMPTS[:2], greedy(2))] == [0, 0]
    core.close()
    assert "Prefix caching: off, by mamba_cache_mode='none'" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"mamba_cache_mode": "all"}, {"mamba_block_size": 32}, {"mamba_ssm_cache_dtype": "bfloat16"}],
    ids=str,
)
def test_options_of_states_are_refused_by_name_for_models_without_them(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path)
    ((name, value),) = options.items()
    with pytest.raises(UnsupportedFeature, match=f"{name}={value!r} is of no use to this model"):
        make_core(tmp_path, **options)
    with pytest.raises(UnsupportedFeature, match=f"{name}={value!r} is of no use to this model"):
        plan_engine(tmp_path, **options)


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_the_layer_cuts_a_program_in_two(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    run(core, PROMPTS[:2], greedy(6))

    def segments(worker: Any) -> set[int]:
        return {
            0 if found is None else found.num_segments for found in worker.runner.execution.programs._recorded.values()
        }

    assert core.collective_rpc(RpcCall(segments)) == [{2}]
    core.close()


@pytest.mark.parametrize("options", [{}, {"cudagraph_mode": "full"}, NGRAM], ids=str)
@pytest.mark.one_path(reason="runs engines with and without fast paths itself")
def test_graphs_of_steps_read_and_write_the_pages_of_the_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    device = use_graphs(monkeypatch)

    def serve(**more: Any) -> Sequence[Result]:
        core = make_core(folder, **OPTIONS, **options, **more, max_num_seqs=4, attention_backend=PaddedBackend.name)
        try:
            return [*run(core, PROMPTS[:4], greedy(12)), *run(core, PROMPTS[:4], greedy(12))]
        finally:
            core.close()

    results = serve()
    assert device.num_replays > device.num_captures > 0
    assert device.refusals == []
    assert [result.tokens for result in results] == [result.tokens for result in serve(fast_paths="off")]


@pytest.mark.parametrize("options", [{}, {"record_window_s": 0.02, **NGRAM}], ids=str)
@pytest.mark.each_value_quick
def test_recordings_are_replayed_from_states_that_are_computed_anew(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    file = tmp_path / "steps.rec"
    core = make_core(folder, **OPTIONS, **options, record=str(file), record_prompts=True)
    for _ in range(4):
        results = run(core, PROMPTS, PARAMS)
    core.close()
    assert [result.num_cached_tokens for result in results] == [4, 36, 0, 28, 12, 20]
    for recording in [file, *tmp_path.glob("steps.rec.*")]:
        report = replay(recording)
        assert report.is_equal, report.differences
        # A window may begin between two requests.
        assert report.num_steps > 0
        assert options or (report.num_compared > 200 and report.num_filled_tokens > 0)


class FailingOnce(FailingWorker):
    """Fails in its ninth step, once."""


def test_requests_go_on_in_a_worker_that_replaces_a_failed_one(folder: Path, alone: list[Result]) -> None:
    FailingOnce.fails_at = {("execute", 9)}
    core = make_core(folder, **OPTIONS, worker_cls=f"{__name__}.FailingOnce")
    assert_equal(run(core, PROMPTS, PARAMS), alone)
    assert not FailingOnce.fails_at
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, NGRAM], ids=str)
def test_ranks_of_a_tensor_parallel_group_keep_a_part_of_the_state_each(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    install_plugin(tmp_path, monkeypatch, "running_sum")
    results = []
    for more in ({"fast_paths": "off"}, options):
        core = make_core(folder, **OPTIONS, **more, tensor_parallel_size=2)
        (state,) = [group.spec for group in core.kv_cache_config.groups if isinstance(group.spec, RecurrentStateSpec)]
        assert state.state_bytes == 1 << 19
        results += [run(core, PROMPTS, PARAMS) for _ in range(2)]
        core.close()
    for result in results[1:]:
        assert_equal(result, results[0])
