"""Images in prompts where several workers, or core processes, serve."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from core.plugins import assert_equal
from core.test_multimodal_engines import OPTIONS, add_prompt, run, texts
from penstock import SamplingParams
from penstock.config import EngineConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.replay import replay
from penstock.engine.session import Session
from penstock.errors import UnsupportedFeature
from penstock.executor import MultiprocessExecutor, large_messages
from penstock.features.multimodal.scheduling import MediaScheduling
from support.arrangements import assert_same
from support.engines import Result, finish, make_core
from support.features import scheduler_side
from support.multimodal_models import MediaPrompt, expanded, save_multimodal

pytestmark = pytest.mark.one_path(reason="what workers share is no matter of how they make their steps")
TENSOR, PIPELINE = {"tensor_parallel_size": 2, "num_threads": 2}, {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    save_multimodal(folder, "qwen2.5-vl", num_key_value_heads=1)
    return folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[MediaPrompt]:
    return expanded(folder, texts("qwen2.5-vl"))


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[MediaPrompt]) -> list[Result]:
    return results_of(make_core(folder, **OPTIONS, fast_paths="auto"), prompts)


def results_of(core: EngineCore, prompts: list[MediaPrompt]) -> list[Result]:
    try:
        return run(core, prompts)
    finally:
        core.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        TENSOR,
        {**PIPELINE, "max_num_batched_tokens": 7},
        {**TENSOR, "enable_sp": True, "sp_min_token_num": 4},
        {**TENSOR, "decode_context_parallel_size": 2, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_workers_together_give_the_tokens_of_one(
    folder: Path, prompts: list[MediaPrompt], expected: list[Result], options: dict[str, Any]
) -> None:
    found = results_of(make_core(folder, **OPTIONS, **options), prompts)
    if "pipeline_parallel_size" in options:
        assert_equal(found, expected)
    else:
        assert_same(found, expected)


@pytest.mark.slow
def test_messages_in_shared_memory_change_no_token(
    folder: Path, prompts: list[MediaPrompt], expected: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with pixels of large images: requests to the core's process, and steps to the ranks.
    monkeypatch.setattr(large_messages, "_LARGE_BYTES", 100)
    before = psutil.Process().num_fds()
    assert_same(results_of(make_core(folder, **OPTIONS, **TENSOR), prompts), expected)
    assert psutil.Process().num_fds() == before
    small = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "4MiB"}
    config = EngineConfig.create(str(folder), enable_multiprocessing=True, **OPTIONS, **small)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with closing(Session(config)) as session:
        (text, images), *_ = texts("qwen2.5-vl")
        accepted = session.accept({"prompt": text, "multi_modal_data": {"image": images}}, params)
        *_, last = session.run([accepted])
        assert list(last.output().outputs[0].token_ids) == expected[0].tokens
    assert psutil.Process().num_fds() == before


def process_ids(core: EngineCore) -> list[int]:
    executor = core._executor
    assert isinstance(executor, MultiprocessExecutor)
    return executor.process_ids


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_rank_that_is_killed_within_an_image_changes_no_token(
    folder: Path, prompts: list[MediaPrompt], num_steps: int
) -> None:
    options = {**OPTIONS, **TENSOR, "max_num_batched_tokens": 9}
    expected = results_of(make_core(folder, **options), prompts)
    core = make_core(folder, **options)
    cache, before = scheduler_side(core, MediaScheduling).cache, process_ids(core)
    for number, prompt in enumerate(prompts):
        add_prompt(core, f"r{number}", prompt)
    results: dict[str, Result] = {}
    # Until a request has taken in a part of an image after so many steps.
    while num_steps > 0 or not cache.num_used_rows:
        num_steps -= 1
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
    os.kill(before[1], signal.SIGKILL)
    finish(core, results)
    assert not set(process_ids(core)) & set(before)
    assert_equal([results[f"r{number}"] for number in range(len(prompts))], expected)
    core.step()
    assert cache.num_used_rows == core.scheduler.kv_cache.num_used_blocks == 0
    core.close()


def test_levels_of_features_beyond_the_first_stage_are_refused(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "qwen3-vl")
    with pytest.raises(UnsupportedFeature, match="pipeline_parallel_size=2 with .* 2 levels .*: layers 0 to 1 "):
        make_core(tmp_path, **OPTIONS, **PIPELINE)


@pytest.mark.parametrize("options", [{}, {"data_parallel_size": 2}], ids=str)
@pytest.mark.slow
def test_requests_go_on_over_the_death_of_their_core(
    folder: Path, expected: list[Result], options: dict[str, Any]
) -> None:
    small = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "4MiB", "max_num_batched_tokens": 16}
    config = EngineConfig.create(str(folder), enable_multiprocessing=True, **OPTIONS, **small, **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with closing(Session(config)) as session:
        core = session._core
        assert isinstance(core, CoreGroup)
        given: list[Any] = [
            {"prompt": text, "multi_modal_data": {"image": images}} if images else text
            for text, images in texts("qwen2.5-vl")
        ]
        accepted = [session.accept(prompt, params) for prompt in given]
        tokens: dict[str, list[int]] = {}
        for number, progress in enumerate(session.run(accepted)):
            if number == 6:
                os.kill(core.process_ids[0], signal.SIGKILL)
            if progress.finished:
                tokens[progress.req_id] = list(progress.output().outputs[0].token_ids)
    assert [tokens[one.request.req_id] for one in accepted] == [one.tokens for one in expected]


def test_a_recording_with_images_is_replayed(folder: Path, prompts: list[MediaPrompt], tmp_path: Path) -> None:
    file = tmp_path / "steps.rec"
    options = {"max_num_batched_tokens": 16, "kv_cache_memory_bytes": 110 << 10, "max_model_len": 64}
    results_of(make_core(folder, **{**OPTIONS, **options}, record=str(file), record_prompts=True), prompts)
    report = replay(file)
    assert report.is_equal, report.differences
    assert report.num_compared > 50
