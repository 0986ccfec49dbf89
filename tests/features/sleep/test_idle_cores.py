"""Cores that sleep by themselves: pauses, calls, deeper sleeps and wake-ups while they do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run
from support.sleepers import call, put_to_sleep, state_of, until_done, zeroed_weights
from support.waiting import wait_until

pytestmark = pytest.mark.one_path(reason="both paths read the same memory")
PROMPTS = random_prompts((5, 37), VOCAB_SIZE, seed=3)
PARAMS = greedy(6, logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, hidden_size=128, intermediate_size=256, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture
def core(folder: Path) -> Iterator[EngineCore]:
    core = make_core(folder, block_size=4, sleep_idle_seconds=0.02)
    yield core
    core.close()


def said(core: EngineCore) -> list[Any]:
    return [(result.tokens, result.logprobs, result.error) for result in run(core, PROMPTS, PARAMS)]


def fall_idle(core: EngineCore) -> None:
    def is_idle() -> bool:
        core.step()
        return state_of(core).is_idle

    wait_until(is_idle, "the core sleeps by itself")
    assert are_zeroed(core)
    assert (call(core, "is_sleeping"), call(core, "is_paused")) == (True, False)


def are_zeroed(core: EngineCore) -> bool:
    # As a function's call would wake it, ask the executor.
    return all(all(one) for one in core._executor.collective_rpc(RpcCall(zeroed_weights)))


def test_a_pause_of_an_idle_core_leaves_it_asleep_and_calls_find_their_memory(core: EngineCore) -> None:
    expected = said(core)
    fall_idle(core)
    until_done(core, "pause", "keep")
    assert state_of(core).name == "paused (keep)"
    assert are_zeroed(core)
    assert (call(core, "is_sleeping"), call(core, "is_paused")) == (True, True)
    # Weights that come during the pause are not overwritten by those of the sleep.
    call(core, "reload_weights")
    assert not are_zeroed(core)
    assert state_of(core).name == "paused (keep)"
    assert (call(core, "is_sleeping"), call(core, "is_paused")) == (False, True)
    core.collective_rpc(RpcCall(_double_the_head))
    call(core, "resume")
    changed = said(core)
    assert changed != expected
    call(core, "reload_weights")
    assert said(core) == expected


def _double_the_head(worker: Any) -> None:
    for parameter in worker.weights.model.parameters():
        parameter.data.mul_(1.25)


def test_a_core_that_was_idle_before_a_pause_is_idle_after_it_unless_requests_wait(core: EngineCore) -> None:
    expected = said(core)
    for has_request in (False, True):
        fall_idle(core)
        until_done(core, "pause", "keep")
        if has_request:
            add(core, "late", PROMPTS[0], PARAMS)
        call(core, "resume")
        assert state_of(core).is_idle
        if has_request:
            late: dict[str, Result] = {}
            finish(core, late)
            assert late["late"].tokens == expected[0][0]
    assert said(core) == expected


def test_a_core_that_is_idle_again_after_a_wake_up_or_a_pause_sleeps_again(core: EngineCore) -> None:
    fall_idle(core)
    call(core, "wake_up")
    fall_idle(core)
    put_to_sleep(core)
    call(core, "wake_up")
    until_done(core, "pause", "keep")
    call(core, "resume")
    fall_idle(core)


def test_an_idle_core_that_is_put_to_sleep_at_level_2_has_no_weights_afterwards(core: EngineCore) -> None:
    expected = said(core)
    fall_idle(core)
    put_to_sleep(core, 2)
    call(core, "wake_up")
    assert state_of(core).name == "weights undefined"
    call(core, "reload_weights")
    assert said(core) == expected


def test_an_engine_whose_core_runs_nothing_between_calls_refuses_to_sleep_by_itself(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"sleep_idle_seconds=60 needs a core that runs between calls.*call sleep"):
        LLM(folder, sleep_idle_seconds=60)
