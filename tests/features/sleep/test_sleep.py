"""Engines that sleep: memory is given back, and what they say afterwards has the same bits."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.contract import RpcCall
from penstock.contract.memory_tags import MEMORY_TAGS
from penstock.device.cpu import CpuDevice
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import EngineAsleep, InvalidRequest, OutOfMemory
from penstock.scheduler.outputs import FinishReason
from support.adapters import VARIANTS, make_adapters, parts_of, request_of
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_checkpoint, tiny_model
from support.draft_heads import eagle3_weights, write_head
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run
from support.multimodal_answers import answer
from support.multimodal_models import PLACEHOLDERS, picture, save_multimodal, words
from support.sleepers import call, has_written_blocks, put_to_sleep, state_of, until_done, zeroed_weights

pytestmark = pytest.mark.one_path(reason="both paths read the same memory")
PROMPTS = random_prompts((5, 37, 1, 40, 13), VOCAB_SIZE, seed=3)
PARAMS = greedy(12, logprobs=3)
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCAB_SIZE}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, **WIDE)
    return folder


@pytest.fixture
def core(folder: Path) -> Iterator[EngineCore]:
    core = make_core(folder, block_size=4)
    yield core
    core.close()


def values(results: list[Result]) -> list[Any]:
    return [(result.tokens, result.logprobs, result.error) for result in results]


def assert_sleeps(core: EngineCore, expected: list[Any]) -> None:
    """Two sleeps of level 1, whole and in parts, change no bit of what it says."""
    put_to_sleep(core)
    assert all(all(zeroed) for zeroed in core.collective_rpc(RpcCall(zeroed_weights)))
    assert not any(core.collective_rpc(RpcCall(has_written_blocks)))
    assert call(core, "is_sleeping") is True
    call(core, "wake_up")
    assert values(run(core, PROMPTS, PARAMS)) == expected
    put_to_sleep(core, 1, "keep")
    for tag in MEMORY_TAGS:
        call(core, "wake_up", [tag])
    assert not call(core, "is_sleeping")
    assert values(run(core, PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int8", "quantization_calibration": "none"},
        {"quantization": "int4", "quantization_calibration": "none"},
        {"dtype": "bfloat16"},
        {"speculative_config": NGRAM},
        {"fast_paths": "off"},
    ],
    ids=str,
)
@pytest.mark.one_case_quick
def test_what_an_engine_says_has_the_same_bits_after_a_sleep(folder: Path, options: dict[str, Any]) -> None:
    core = make_core(folder, block_size=4, **options)
    expected = values(run(core, PROMPTS, PARAMS))
    assert_sleeps(core, expected)
    core.close()


@pytest.mark.parametrize("family", ["qwen3_5", "mixtral", "deepseek_v3", "gemma3"])
@pytest.mark.one_case_quick
def test_models_of_every_kind_sleep(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    core = make_core(tmp_path, block_size=4, dtype="float32")
    assert_sleeps(core, values(run(core, PROMPTS, PARAMS)))
    core.close()


def test_a_model_with_images_encodes_them_again(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "smolvlm")
    image = PLACEHOLDERS.get("smolvlm", "<image>")
    prompts = [(f"{words(5, 6)} {image} {words(7, 8)}", {"image": [picture(40, 24, 1)]})]
    with LLM(tmp_path, dtype="float32", block_size=4, max_model_len=128, kv_cache_memory_bytes="4MiB") as llm:

        def said() -> list[Any]:
            return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in answer(llm, prompts)]

        def num_encoded() -> float:
            return float(llm.collective_rpc("get_encoder_timing_stats")[0]["num_items"])

        expected, first = said(), num_encoded()
        assert said() == expected
        assert num_encoded() == first
        llm.sleep()
        llm.wake_up()
        assert said() == expected
        assert num_encoded() == first + 1


def test_a_drafter_sleeps_with_its_target(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "target", num_hidden_layers=5)
    write_head(tmp_path / "eagle3", eagle3_weights(), draft_vocab_size=40)
    drafts = {"method": "eagle3", "model": str(tmp_path / "eagle3"), "num_speculative_tokens": 3, "adaptive": False}
    core = make_core(tmp_path / "target", block_size=4, speculative_config=drafts)
    expected = values(run(core, PROMPTS, PARAMS))
    accepted = core.scheduler.spec_decode_metrics.num_accepted_tokens
    assert_sleeps(core, expected)
    assert core.scheduler.spec_decode_metrics.num_accepted_tokens == 3 * accepted
    core.close()


def test_adapters_sleep_in_their_slots_at_both_levels(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    save_checkpoint(model, tmp_path / "model")
    adapters = [request_of(index + 1, path) for index, path in enumerate(make_adapters(model, tmp_path, VARIANTS[:2]))]
    core = make_core(tmp_path / "model", block_size=4, enable_lora=True, max_loras=2, max_lora_rank=16)

    def said() -> list[Any]:
        results: dict[str, Result] = {}
        for index, adapter in enumerate([None, *adapters]):
            add(core, str(index), PROMPTS[1], PARAMS, parts=parts_of(adapter))
        finish(core, results)
        return values([results[str(index)] for index in range(3)])

    expected = said()
    assert expected[0] != expected[1] != expected[2]
    put_to_sleep(core)
    with pytest.raises(EngineAsleep, match=r"add_lora needs weights in memory, and the engine is sleeping"):
        call(core, "add_lora", adapters[0])
    call(core, "wake_up")
    assert said() == expected
    put_to_sleep(core, 2)
    call(core, "wake_up")
    call(core, "reload_weights")
    assert said() == expected
    core.close()


@pytest.mark.parametrize("options", [{}, {"quantization": "int8", "quantization_calibration": "none"}], ids=str)
def test_level_2_drops_the_weights_until_they_are_sent_again(folder: Path, options: dict[str, Any]) -> None:
    core = make_core(folder, block_size=4, **options)
    expected = values(run(core, PROMPTS, PARAMS))
    put_to_sleep(core, 2)
    call(core, "wake_up", ["weights"])
    call(core, "wake_up", ["kv_cache"])
    assert all(all(zeroed) for zeroed in core.collective_rpc(RpcCall(zeroed_weights)))
    assert state_of(core).name == "weights undefined"
    with pytest.raises(EngineAsleep, match=r"no requests now \(weights undefined\).*level 2.*reload_weights"):
        add(core, "refused", PROMPTS[0], PARAMS)
    call(core, "reload_weights")
    assert state_of(core).name == "running"
    assert values(run(core, PROMPTS, PARAMS)) == expected
    core.close()


def start(core: EngineCore, num_steps: int) -> dict[str, Result]:
    """Requests of which some run, since the others do not fit, after some steps."""
    for index, prompt in enumerate(PROMPTS):
        add(core, str(index), prompt, PARAMS)
    results: dict[str, Result] = {}
    for _ in range(num_steps):
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
    return results


def test_kept_requests_go_on_with_the_same_tokens(core: EngineCore) -> None:
    expected = values(run(core, PROMPTS, PARAMS))
    results = start(core, 4)
    assert results
    put_to_sleep(core, 1, "keep", results=results)
    add(core, "late", PROMPTS[0], PARAMS)
    for _ in range(3):
        assert core.step() == []
    assert core.stats().state.name == "sleeping (level 1: weights, kv_cache)"
    call(core, "wake_up")
    finish(core, results)
    assert values([results[str(index)] for index in range(len(PROMPTS))]) == expected
    assert values([results["late"]]) == expected[:1]


def test_running_requests_finish_where_a_sleep_waits_and_new_ones_wait(folder: Path) -> None:
    core = make_core(folder, block_size=4, max_num_seqs=2)
    expected = values(run(core, PROMPTS, PARAMS))
    results = start(core, 4)
    put_to_sleep(core, 1, "wait", results=results)
    ended = {req_id for req_id, result in results.items() if result.finish_reason is not None}
    assert ended == {"0", "1"}
    assert core.stats().num_waiting_reqs == 3
    call(core, "wake_up")
    finish(core, results)
    assert values([results[str(index)] for index in range(len(PROMPTS))]) == expected
    core.close()


def test_aborted_requests_end_and_new_ones_are_refused_by_the_state(core: EngineCore) -> None:
    results = start(core, 4)
    put_to_sleep(core, 1, "abort", results=results)
    assert {result.finish_reason for result in results.values()} == {FinishReason.ABORT}
    assert len(results) == len(PROMPTS)
    with pytest.raises(EngineAsleep, match=r"takes no requests now \(sleeping \(level 1: weights, kv_cache\)\). Wake"):
        add(core, "late", PROMPTS[0], PARAMS)
    call(core, "wake_up")
    run(core, PROMPTS, PARAMS)


def test_a_pause_freezes_requests_and_their_kv_cache(core: EngineCore) -> None:
    expected = values(run(core, PROMPTS, PARAMS))
    results = start(core, 4)
    until_done(core, "pause", "keep", False, results=results)
    assert call(core, "is_paused")
    assert not call(core, "is_sleeping")
    assert core.stats().num_running_reqs == len(PROMPTS)
    assert core.step() == []
    call(core, "resume")
    assert not call(core, "is_paused")
    finish(core, results)
    assert values([results[str(index)] for index in range(len(PROMPTS))]) == expected
    assert all(result.num_preemptions == 0 for result in results.values())


def test_a_pause_outlasts_a_sleep_within_it(core: EngineCore) -> None:
    until_done(core, "pause", "keep")
    put_to_sleep(core)
    call(core, "wake_up")
    assert state_of(core).name == "paused (keep)"
    call(core, "resume")
    run(core, PROMPTS, PARAMS)


def test_a_sleep_that_waits_within_a_pause_keeps_what_the_pause_keeps(core: EngineCore) -> None:
    expected = values(run(core, PROMPTS, PARAMS))
    results = start(core, 4)
    until_done(core, "pause", "keep", False, results=results)
    put_to_sleep(core, 1, "wait", results=results)
    assert not any(result.finish_reason for result in results.values())
    call(core, "wake_up")
    assert state_of(core).name == "paused (keep)"
    assert core.step() == []
    call(core, "resume")
    finish(core, results)
    assert values([results[str(index)] for index in range(len(PROMPTS))]) == expected


def test_a_pause_that_waits_lets_those_finish_that_the_one_before_it_kept(core: EngineCore) -> None:
    expected = values(run(core, PROMPTS, PARAMS))
    results = start(core, 4)
    until_done(core, "pause", "keep", results=results)
    until_done(core, "pause", "wait", results=results)
    assert values([results[str(index)] for index in range(len(PROMPTS))]) == expected
    assert core.stats().state.name == "paused (wait)"
    put_to_sleep(core)
    call(core, "wake_up")
    assert core.stats().state.name == "paused (wait)"
    call(core, "resume")
    run(core, PROMPTS, PARAMS)


def test_a_pause_clears_the_prefix_cache_unless_it_is_told_not_to(core: EngineCore) -> None:
    params = greedy(2)
    run(core, [PROMPTS[3]], params)
    until_done(core, "pause", "keep", False)
    call(core, "resume")
    (again,) = run(core, [PROMPTS[3]], params)
    until_done(core, "pause", "keep", True)
    call(core, "resume")
    (anew,) = run(core, [PROMPTS[3]], params)
    assert (again.num_cached_tokens > 0, anew.num_cached_tokens) == (True, 0)


def test_calls_in_the_wrong_order_are_refused_by_name_or_do_nothing(core: EngineCore) -> None:
    expected = values(run(core, PROMPTS, PARAMS))
    call(core, "wake_up")
    call(core, "resume")
    wrong = [((3,), "1 .*, 2"), ((True,), "1"), ((1, "later"), "abort, wait, keep"), ((1, "abort", ["x"]), "kv_cache")]
    for given, allowed in wrong:
        with pytest.raises(InvalidRequest, match=rf"is not valid. Allowed: .*{allowed}"):
            call(core, "sleep", *given)
    with pytest.raises(InvalidRequest, match="between parts of the engine"):
        call(core, "reserve_sleep")
    put_to_sleep(core)
    put_to_sleep(core)
    with pytest.raises(EngineAsleep, match=r"sleep\(level=2\) is not possible: the engine is sleeping \(level 1.*Wake"):
        call(core, "sleep", 2)
    for method in ("reload_weights", "save_sharded_state", "apply_model", "execute_dummy_batch"):
        with pytest.raises(EngineAsleep, match=rf"{method} needs .*weights.*wake_up\(tags=\['weights'"):
            call(core, method)
    call(core, "wake_up", ["weights"])
    call(core, "reload_weights")
    assert state_of(core).name == "sleeping (level 1: kv_cache)"
    assert core.reset_prefix_cache()
    call(core, "wake_up", ["kv_cache"])
    assert values(run(core, PROMPTS, PARAMS)) == expected
    put_to_sleep(core, 2)
    call(core, "wake_up")
    with pytest.raises(EngineAsleep, match=r"sleep\(level=1\) would keep weights that are undefined"):
        call(core, "sleep", 1)
    put_to_sleep(core, 2)
    call(core, "wake_up")
    call(core, "reload_weights")
    assert values(run(core, PROMPTS, PARAMS)) == expected


def test_a_full_disk_refuses_the_sleep_before_anything_is_given_back(core: EngineCore) -> None:
    """The system's limit of a file's size stands for the full disk."""
    expected = values(run(core, PROMPTS, PARAMS))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OutOfMemory, match=r"The weights need .*, which could not be written there: .*level=2"):
            put_to_sleep(core)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert state_of(core).is_running
    assert not any(core.collective_rpc(RpcCall(zeroed_weights))[0])
    assert values(run(core, PROMPTS, PARAMS)) == expected


def test_an_engine_sleeps_on_while_its_memory_is_not_free(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = values(run(core, PROMPTS, PARAMS))
    put_to_sleep(core)
    with monkeypatch.context() as patched:
        snapshot = CpuDevice.memory_snapshot
        patched.setattr(CpuDevice, "memory_snapshot", lambda self: replace(snapshot(self), free=1000))
        with pytest.raises(
            OutOfMemory, match=r"Waking weights, kv_cache needs .*only 1000 bytes are free.*stays asleep"
        ):
            call(core, "wake_up")
    assert state_of(core).tags == MEMORY_TAGS
    call(core, "wake_up")
    assert values(run(core, PROMPTS, PARAMS)) == expected


def test_workers_whose_backup_cannot_be_read_are_replaced(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = values(run(core, PROMPTS, PARAMS))
    put_to_sleep(core)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        call(core, "wake_up", ["weights"])
    assert core.num_worker_restarts == 1
    assert state_of(core).tags == ("kv_cache",)
    call(core, "wake_up")
    assert values(run(core, PROMPTS, PARAMS)) == expected


def test_workers_replaced_while_their_engine_has_no_weights_have_none_without_room_for_a_backup_too(
    folder: Path, tmp_path: Path
) -> None:
    """What sleeps at level 2 beside the weights needs a file; here its folder is gone by then."""
    core = make_core(folder, block_size=4, sleep_dir=str(tmp_path))
    expected = values(run(core, PROMPTS, PARAMS))
    put_to_sleep(core, 2)
    tmp_path.rmdir()
    core._interrupted = "the workers are to be replaced"
    call(core, "wake_up")
    assert core.num_worker_restarts == 1
    assert state_of(core).name == "weights undefined"
    call(core, "reload_weights")
    assert values(run(core, PROMPTS, PARAMS)) == expected
    core.close()


def test_a_folder_that_is_removed_after_the_backup_is_not_missed(folder: Path, tmp_path: Path) -> None:
    core = make_core(folder, block_size=4, sleep_dir=str(tmp_path))
    expected = values(run(core, PROMPTS, PARAMS))
    put_to_sleep(core)
    tmp_path.rmdir()
    call(core, "wake_up")
    assert values(run(core, PROMPTS, PARAMS)) == expected
    for level, says in (1, r".*level=2 needs less"), (2, r"[^.]*\.$"):
        with pytest.raises(OutOfMemory, match=rf"could not be written there: No such file.*set sleep_dir{says}"):
            put_to_sleep(core, level)
    assert state_of(core).is_running
    assert values(run(core, PROMPTS, PARAMS)) == expected
    core.close()


def test_an_engine_that_falls_asleep_says_what_lets_it_go_on(core: EngineCore) -> None:
    start(core, 4)
    assert call(core, "sleep", 1, "wait") is False
    assert state_of(core).name == "falling asleep"
    assert state_of(core).how_to_run == "Wake it up first (wake_up)."
    call(core, "wake_up")
    assert state_of(core).is_running
    finish(core, {})


def test_two_engines_take_turns(folder: Path) -> None:
    cores = [make_core(folder, block_size=4), make_core(folder, block_size=4, quantization="int8")]
    expected = []
    for core in cores:
        expected.append(values(run(core, PROMPTS, PARAMS)))
        put_to_sleep(core)
    for _ in range(2):
        for core, own in zip(cores, expected, strict=True):
            call(core, "wake_up")
            assert values(run(core, PROMPTS, PARAMS)) == own
            put_to_sleep(core)
    for core in cores:
        core.close()


def test_an_engine_that_is_closed_while_it_sleeps_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    core = make_core(folder, sleep_dir=str(tmp_path))
    num_files = len(os.listdir("/proc/self/fd"))
    put_to_sleep(core)
    # It has no name, so that it ends with its process.
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_files + 2
    core.close()
    assert len(os.listdir("/proc/self/fd")) <= num_files
