"""Requests of an engine that rests: they wait for another thread, and end with an error where none lets it go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import EngineAsleep, LifecycleError
from support.waiting import wait_until

PROMPT = {"prompt_token_ids": [3, 1, 4, 1, 5]}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
RESTS: dict[str, tuple[Callable[[LLM], None], Callable[[LLM], None], str]] = {
    "pause keep": (lambda llm: llm.pause_generation("keep"), lambda llm: llm.resume_generation(), "paused .keep"),
    "pause wait": (lambda llm: llm.pause_generation("wait"), lambda llm: llm.resume_generation(), "paused .wait"),
    "sleep keep": (lambda llm: llm.sleep(mode="keep"), lambda llm: llm.wake_up(), "sleeping .level 1: weights"),
}


def make(**options: Any) -> LLM:
    return LLM("demo", kv_cache_memory_bytes="1MiB", max_model_len=128, **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return said(llm)


def said(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("rest", RESTS)
def test_a_thread_does_not_wait_for_itself(llm: LLM, expected: list[int], rest: str) -> None:
    begin, end, name = RESTS[rest]
    for _ in range(2):
        begin(llm)
        assert llm.is_paused()
        with pytest.raises(LifecycleError, match=f"Requests wait: the engine is {name}.*(resume|wake_up)"):
            said(llm)
        assert llm.llm_engine.get_num_unfinished_requests() == 0
        end(llm)
        assert said(llm) == expected


@pytest.mark.parametrize("rest", RESTS)
def test_a_thread_waits_for_the_one_that_lets_it_go_on(llm: LLM, expected: list[int], rest: str) -> None:
    begin, end, _ = RESTS[rest]
    with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as caller:
        other.submit(begin, llm).result()
        answer = caller.submit(said, llm)
        wait_until(lambda: llm._session._core.stats().num_waiting_reqs == 1, "the request waits")
        assert not answer.done()
        other.submit(end, llm).result()
        assert answer.result() == expected


def test_a_thread_that_has_ended_lets_nothing_go_on(llm: LLM, expected: list[int]) -> None:
    thread = threading.Thread(target=lambda: llm.pause_generation("keep"))
    thread.start()
    thread.join()
    with pytest.raises(LifecycleError, match="Requests wait: the engine is paused"):
        said(llm)
    llm.resume_generation()
    assert said(llm) == expected


def test_a_pause_that_begins_meanwhile_is_waited_for(llm: LLM, expected: list[int]) -> None:
    session = llm._session
    steps = session.run([session.accept(PROMPT, PARAMS)])
    with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as caller:
        assert not caller.submit(next, steps).result().finished
        other.submit(llm.pause_generation, "keep").result()
        answer = caller.submit(list, steps)
        assert not answer.done()
        other.submit(llm.resume_generation).result()
        assert answer.result()[-1].output().outputs[0].token_ids == expected


def test_requests_of_an_aborting_pause_are_refused(llm: LLM, expected: list[int]) -> None:
    llm.pause_generation()
    with pytest.raises(EngineAsleep, match="takes no requests now"):
        said(llm)
    llm.resume_generation()
    assert said(llm) == expected


@pytest.mark.slow
def test_cores_in_processes_of_their_own(expected: list[int]) -> None:
    with make(enable_multiprocessing=True) as llm:
        assert said(llm) == expected
        for begin, end, name in RESTS.values():
            for _ in range(3):
                begin(llm)
                with pytest.raises(LifecycleError, match=f"Requests wait: the engine is {name}"):
                    said(llm)
                end(llm)
                assert said(llm) == expected
