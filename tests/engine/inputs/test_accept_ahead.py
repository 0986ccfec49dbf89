"""Prompts are accepted in a thread while the first ones run, in their order, and with their errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from penstock.contract import SamplingParams
from penstock.engine.inputs.accept_ahead import AcceptAhead
from penstock.engine.inputs.input_processor import AcceptedRequest
from penstock.engine.messages import EngineRequest
from penstock.errors import InvalidRequest
from support.waiting import PATIENCE_S

PROMPTS = [str(index) for index in range(1000)]


def accepted(prompts: Sequence[str]) -> list[AcceptedRequest]:
    return [
        AcceptedRequest(EngineRequest(req_id=one, prompt_token_ids=[1], sampling_params=SamplingParams()), one, "")
        for one in prompts
    ]


def take_all(source: AcceptAhead) -> list[str]:
    taken: list[str] = []
    while (more := source.take(wait=True)) is not None:
        taken += [request.request.req_id for request in more]
    return taken


@pytest.mark.parametrize("count", [0, 1, 32, 33, 1000])
def test_every_prompt_is_accepted_once_and_in_order(count: int) -> None:
    with AcceptAhead(accepted, PROMPTS[:count]) as source:
        assert take_all(source) == PROMPTS[:count]
        assert [one.prompt for one in source.accepted] == PROMPTS[:count]


def test_the_first_requests_are_there_before_the_last_prompts_are_accepted() -> None:
    go_on, is_first = threading.Event(), threading.Event()

    def accept(prompts: Sequence[str]) -> list[AcceptedRequest]:
        if is_first.is_set():
            assert go_on.wait(PATIENCE_S)
        is_first.set()
        return accepted(prompts)

    with AcceptAhead(accept, PROMPTS) as source:
        first = source.take(wait=True)
        assert first is not None
        assert 0 < len(first) < len(PROMPTS)
        assert source.take(wait=False) == []
        go_on.set()
        assert len(first) + len(take_all(source)) == len(PROMPTS)


@pytest.mark.parametrize("wrong", ["5", "900"])
def test_an_error_reaches_the_caller(wrong: str) -> None:
    def accept(prompts: Sequence[str]) -> list[AcceptedRequest]:
        if wrong in prompts:
            raise InvalidRequest(f"prompts[{wrong}]: no")
        return accepted(prompts)

    with AcceptAhead(accept, PROMPTS) as source, pytest.raises(InvalidRequest, match=rf"prompts\[{wrong}\]"):
        take_all(source)


def test_leaving_the_context_ends_the_thread() -> None:
    num_accepted = 0

    def accept(prompts: Sequence[str]) -> list[AcceptedRequest]:
        nonlocal num_accepted
        num_accepted += len(prompts)
        return accepted(prompts)

    with AcceptAhead(accept, PROMPTS * 200) as source:
        source.take(wait=True)
    assert threading.current_thread() is threading.main_thread()
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-accept"]
    assert num_accepted < len(PROMPTS) * 200
