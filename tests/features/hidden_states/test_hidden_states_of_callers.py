"""Hidden states as callers of the offline and the asynchronous API get them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.inputs.prompts import with_parts
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.session import Session
from penstock.errors import InvalidParameter, UnsupportedParameter
from penstock.features.hidden_states.messages import HiddenStates, OutputHiddenStates, parts_of_hidden_states

DEMO: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "32MiB", "dtype": "float32"}
PROMPTS = ["ROMEO:", "JULIET:\nWhat is"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **DEMO) as llm:
        yield llm


def states_of(output: RequestOutput, index: int = 0) -> HiddenStates:
    states = output.outputs[index].hidden_states
    assert states is not None
    return states


def test_prompts_of_a_call_share_arguments_and_one_may_have_parts_of_its_own(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY, use_tqdm=False, return_hidden_states="all", hidden_states_layers=[2, -1])
    prompts: list[Any] = [
        {"prompt": PROMPTS[0], "parts": {"hidden_states": {"tokens": "all", "layers": [2, -1]}}},
        PROMPTS[1],
    ]
    first, second = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert states_of(first) == states_of(together[0])
    assert second.outputs[0].hidden_states is None
    (chat,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False, return_hidden_states=True)
    assert states_of(chat).num_tokens == 1
    assert states_of(chat).start == len(chat.prompt_token_ids) + 6


def test_outputs_of_one_prompt_have_their_own(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=5, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False, return_hidden_states="all")
    num_prompt = len(output.prompt_token_ids)
    first, second = states_of(output, 0)[-1], states_of(output, 1)[-1]
    assert first.shape == second.shape == (num_prompt + 4, 192)
    assert torch.equal(first[:num_prompt], second[:num_prompt])
    assert not torch.equal(first[num_prompt:], second[num_prompt:])


@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_speculative_tokens": 4}])
@pytest.mark.parametrize("which", ["last", "all"])
def test_a_stop_string_cuts_them_with_the_tokens(llm: LLM, which: str, speculative: Any) -> None:
    (whole,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    stop = whole.outputs[0].text[12:16]
    params = SamplingParams(temperature=0, max_tokens=40, stop=[stop])
    with LLM("demo", **DEMO, speculative_config=speculative) as engine:
        (cut,) = engine.generate(PROMPTS[1], params, use_tqdm=False, return_hidden_states=which)
    num_tokens = len(cut.prompt_token_ids) + len(cut.outputs[0].token_ids)
    assert cut.outputs[0].stop_reason == stop
    again: Any = {"prompt_token_ids": [*cut.prompt_token_ids, *cut.outputs[0].token_ids[:-1]]}
    (expected,) = llm.generate(again, SamplingParams(max_tokens=1), use_tqdm=False, return_hidden_states=which)
    assert states_of(cut) == states_of(expected)
    assert states_of(cut).start + states_of(cut).num_tokens == num_tokens - 1


def test_a_layer_that_was_not_asked_for_is_no_key(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, return_hidden_states=True, hidden_states_layers=[1])
    states = states_of(output)
    assert 1 in states
    assert -1 not in states
    with pytest.raises(KeyError, match="layer -1 was not asked for; there are 1"):
        states[-1]
    assert repr(states).startswith("HiddenStates(layers=[1], dtype='float32', tokens ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("first",), r"return_hidden_states='first' is not valid. Allowed: false, true, 'last' .* or 'all'"),
        ((False, [1]), r"hidden_states_layers=\[1\] has no meaning without return_hidden_states"),
        (("all", "1"), "hidden_states_layers='1' is not valid"),
        (("all", [1.5]), r"hidden_states_layers=\[1.5\] is not valid"),
    ],
)
def test_arguments_are_checked(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        parts_of_hidden_states(*arguments)


def test_an_engine_that_pools_refuses_them() -> None:
    prompt: Any = {"prompt": "a", "parts": {"hidden_states": {}}}
    with (
        LLM("demo", runner="pooling", **DEMO) as llm,
        pytest.raises(UnsupportedParameter, match="hidden_states are not enabled"),
    ):
        llm.embed(prompt, use_tqdm=False)


def test_rows_after_a_gap_of_steps_are_taken_once() -> None:
    (part,) = parts_of_hidden_states("all")

    def rows(start: int, stop: int) -> OutputHiddenStates:
        data = b"".join(bytes([position]) * 4 for position in range(start, stop))
        return OutputHiddenStates(asked=part, dtype="float32", row_bytes=4, start=start, pieces=[data])

    so_far = rows(0, 3).after(None)
    for start, stop in ((3, 4), (0, 2), (2, 7), (7, 8)):  # a new core begins with the first token
        so_far = rows(start, stop).after(so_far)
    assert isinstance(so_far, OutputHiddenStates)
    assert so_far.result(9) == rows(0, 8).result(9)
    assert so_far.result(6).num_tokens == 5


@pytest.mark.slow
def test_files_of_requests_have_them(tmp_path: Path) -> None:
    line = {"prompt": "ROMEO:", "max_tokens": 2, "parts": {"hidden_states": {"tokens": "all"}}}
    messages = [{"role": "user", "content": "Who are you?"}]
    body = {"messages": messages, "max_tokens": 2, "return_hidden_states": "all"}
    chat = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(chat)}\n")
    files = ["--input", f"{tmp_path}/in.jsonl", "--output", f"{tmp_path}/out.jsonl"]
    subprocess.run([sys.executable, "-m", "penstock", "generate", "--model", "demo", *files], check=True, timeout=120)
    result, answered = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert len(result["hidden_states"]["-1"]) == result["num_prompt_tokens"] + 1
    answer = answered["response"]["body"]
    assert len(answer["choices"][0]["hidden_states"]) == answer["usage"]["prompt_tokens"] + 1


def test_the_last_output_of_a_stream_has_them(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, return_hidden_states="all")

    async def run() -> list[RequestOutput]:
        engine = AsyncEngine("demo", enable_multiprocessing=False, **DEMO)
        try:
            return [output async for output in engine.generate(PROMPTS[0], GREEDY, return_hidden_states="all")]
        finally:
            engine.shutdown()

    *others, last = asyncio.run(run())
    assert states_of(last) == states_of(expected)
    assert all(output.outputs[0].hidden_states is None for output in others)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["last", "all"])
def test_they_survive_the_loss_of_a_core(llm: LLM, which: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    options: dict[str, Any] = {"return_hidden_states": which, "hidden_states_layers": [0, 3, -1]}
    expected = llm.generate(PROMPTS, params, use_tqdm=False, **options)
    parts = parts_of_hidden_states(which, [0, 3, -1])
    with closing(Session(EngineConfig.create("demo", enable_multiprocessing=True, **DEMO))) as session:
        core = session._core
        assert isinstance(core, CoreGroup)
        first = core.process_ids[0]
        requests = [session.accept(with_parts(prompt, parts), params) for prompt in PROMPTS]
        ends: dict[str, RequestOutput] = {}
        for number, progress in enumerate(session.run(requests)):
            if number == 60:
                os.kill(first, signal.SIGKILL)
            if progress.finished:
                ends[progress.req_id] = progress.output()
        assert core.process_ids[0] != first
    for accepted, other in zip(requests, expected, strict=True):
        assert states_of(ends[accepted.request.req_id]) == states_of(other)
