"""Blocks that an engine keeps for another one: pulled with the bits of what is computed, or given up after a while."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from features.kv_connector.remote_connector import LEASES, PAGES, PULLED
from penstock.contract import Parts, part_of
from penstock.engine.core.engine_core import EngineCore
from penstock.features.kv_transfer import KVTransferPart, KVTransferResult
from support.checkpoints import tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts

PROMPTS = random_prompts([70, 100, 33, 7], vocab_size=97)
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(autouse=True)
def no_engines() -> Iterator[None]:
    yield
    for known in (PAGES, LEASES, PULLED):
        known.clear()


@contextlib.contextmanager
def engine(model: Path, lease_s: float = 60.0, **options: Any) -> Iterator[EngineCore]:
    config = {
        "kv_connector": "RemoteConnector",
        "kv_connector_module_path": "features.kv_connector.remote_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lease_s": lease_s},
    }
    core = make_core(model, kv_transfer_config=config, **options)
    try:
        yield core
    finally:
        core.close()


def prefill(core: EngineCore) -> list[dict[str, Any] | None]:
    """Compute the prompts for another engine; return what its requests need."""
    for index, prompt in enumerate(PROMPTS):
        add(core, f"p{index}", prompt, greedy(1), parts=Parts.of([KVTransferPart(params=ASKED)]))
    given: dict[str, dict[str, Any]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            part = part_of(output.parts, KVTransferResult)
            if part is not None:
                given[output.req_id] = part.params
    return [given.get(f"p{index}") for index in range(len(PROMPTS))]


def decode(core: EngineCore, given: Sequence[dict[str, Any] | None]) -> list[Result]:
    for index, (prompt, params) in enumerate(zip(PROMPTS, given, strict=True)):
        parts = None if params is None else Parts.of([KVTransferPart(params=params)])
        add(core, f"d{index}", prompt, greedy(12, logprobs=2), parts=parts)
    results: dict[str, Result] = {}
    finish(core, results)
    return [results[f"d{index}"] for index in range(len(PROMPTS))]


def bits(results: Sequence[Result]) -> list[Any]:
    return [(result.tokens, result.logprobs) for result in results]


def turns(core: EngineCore, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        core.step()
        time.sleep(0.002)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_is_computed_by_one_engine_and_continued_by_another(tmp_path: Path, asynchronous: bool) -> None:
    tiny_checkpoint(tmp_path)
    options = {"async_scheduling": asynchronous}
    with engine(tmp_path, **options) as prompts, engine(tmp_path, **options) as answers:
        expected = decode(answers, [None] * len(PROMPTS))
        assert answers.reset_prefix_cache()
        given = prefill(prompts)
        # Whole blocks of 16 tokens; the last prompt has none.
        assert [one and len(one["remote_block_ids"]) for one in given] == [4, 6, 2, None]
        assert prompts.scheduler.kv_cache.num_used_blocks == 5 + 7 + 3
        assert bits(decode(answers, given)) == bits(expected)
        assert answers.stats().counters["external_prefix_cache_hits"] == 64 + 96 + 32
        turns(prompts, 0.05)
        assert prompts.scheduler.kv_cache.num_used_blocks == 0
        prompts.scheduler.kv_cache.check_integrity()
        answers.scheduler.kv_cache.check_integrity()


def test_blocks_for_an_engine_that_never_comes_are_given_up_and_late_ones_are_computed(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with engine(tmp_path, lease_s=0.2) as prompts, engine(tmp_path) as answers:
        expected = decode(answers, [None] * len(PROMPTS))
        assert answers.reset_prefix_cache()
        given = prefill(prompts)
        assert prompts.scheduler.kv_cache.num_used_blocks == 5 + 7 + 3
        turns(prompts, 0.3)
        assert prompts.scheduler.kv_cache.num_used_blocks == 0
        # Others' tokens are in these blocks now.
        assert prompts.reset_prefix_cache()
        decode(prompts, [None] * len(PROMPTS))
        assert bits(decode(answers, given)) == bits(expected)
        assert answers.stats().counters["kv_connector_failed_loads"] == 3
        assert answers.stats().counters["external_prefix_cache_hits"] == 0


def test_blocks_that_a_connector_keeps_for_long_are_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.features.kv_connector.scheduling._LONG_S", 0.05)
    tiny_checkpoint(tmp_path)
    with engine(tmp_path) as prompts:
        prefill(prompts)
        turns(prompts, 0.2)
    assert caplog.text.count("The KV connector keeps the blocks of 3 ended requests, of the first, p") == 1
