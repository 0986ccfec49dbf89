"""`LLM` over a fake core with scripted tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import (
    ConfigError,
    ContextTooLong,
    InvalidParameter,
    InvalidRequest,
    LifecycleError,
    UnknownOption,
)
from support.fake_engine import FakeCore, install_fake_core, scripted, write_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "model"))


@pytest.fixture(autouse=True)
def _fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core()


@pytest.fixture
def llm(model: str) -> Iterator[LLM]:
    with LLM(model) as llm:
        yield llm


@pytest.fixture
def core(llm: LLM) -> FakeCore:
    core = llm._session._core
    assert isinstance(core, FakeCore)
    return core


def test_outputs_come_in_the_prompts_order(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=number) for number in (9, 1, 5)]
    outputs = llm.generate(["the fox", [9, 10], {"prompt": "a dog"}], params)
    assert [output.prompt for output in outputs] == ["the fox", None, "a dog"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("prompt", ["the fox", [9, 10], (9, 10), {"prompt_token_ids": [9, 10]}])
def test_one_prompt_needs_no_list(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, GREEDY)
    assert len(output.outputs[0].token_ids) == 3


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_the_text_is_that_of_the_tokens(llm: LLM, core: FakeCore) -> None:
    ids = llm.get_tokenizer().encode(" jumps over", add_special_tokens=False)
    core.tokens = scripted(*ids, 1)
    (output,) = llm.generate("the fox", SamplingParams(max_tokens=20))
    assert output.outputs[0].text == " jumps over"
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        (["fine", []], GREEDY, InvalidRequest, r"^prompts\[1\]: The prompt is empty"),
        (["fine", [9] * 64], GREEDY, ContextTooLong, r"^prompts\[1\]: The prompt has 64 tokens.*max_model_len"),
        (["fine", "also"], [GREEDY], InvalidRequest, "2 prompts but 1 sampling_params"),
        (["fine", "also"], [GREEDY, SamplingParams(logprobs=21)], InvalidParameter, r"^prompts\[1\]: logprobs=21"),
        (["fine"], {"temperature": 0}, InvalidParameter, "sampling_params is a dict"),
        ("", {"temperature": 0}, InvalidParameter, "^sampling_params is a dict"),
        (7, GREEDY, InvalidRequest, "prompts is a int"),
        ([True], GREEDY, InvalidRequest, "True.*bool"),
    ],
)
def test_one_bad_prompt_fails_the_call_before_any_runs(
    llm: LLM, core: FakeCore, prompts: Any, params: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts, params)
    assert core.added == []
    assert len(llm.generate(["fine"], GREEDY)) == 1


def test_a_request_that_fails_does_not_stop_the_others(llm: LLM, core: FakeCore) -> None:
    core.failing = {11}
    fine, failed = llm.generate([[10, 12], [11, 12]], SamplingParams(max_tokens=6))
    assert (fine.error, fine.outputs[0].finish_reason, len(fine.outputs[0].token_ids)) == (None, "length", 6)
    assert failed.error == "the logits are NaN"
    assert failed.finished
    assert (failed.outputs[0].finish_reason, len(failed.outputs[0].token_ids)) == ("error", 2)


def test_equal_engines_answer_equally_and_equal_prompts_differ(model: str) -> None:
    def answers(seed: int) -> list[list[int]]:
        with LLM(model, seed=seed) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(["the fox", "the fox"])]

    first = answers(3)
    assert answers(3) == first
    assert answers(4) != first
    assert first[0] != first[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_a_call_the_next_one_works(llm: LLM, core: FakeCore, error: type[BaseException]) -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise error

    core.on_step = fail
    with pytest.raises(error):
        llm.generate(["a", "b", "c"])
    assert len(core.aborted) == 3
    assert not core.running
    assert len(llm.generate(["a", "b"])) == 2


def test_a_closed_engine_raises_lifecycle_errors(model: str) -> None:
    with LLM(model) as llm:
        pass
    with pytest.raises(LifecycleError, match="closed"):
        llm.generate("x")
    llm.close()


def test_leaving_the_block_by_an_error_closes_too(model: str) -> None:
    llm = LLM(model)
    core = llm._session._core

    def leave_by_error() -> None:
        with llm:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_by_error()
    assert isinstance(core, FakeCore)
    assert core.num_closes == 1


def test_two_engines_live_side_by_side(model: str) -> None:
    with LLM(model) as first, LLM(model) as second:
        first.generate("x")
        first.close()
        assert second.generate("x")[0].finished


def test_options_reach_the_configuration(model: str) -> None:
    with LLM(model, max_num_seqs=3, gpu_memory_utilization=0.5, policy="priority", seed=9) as llm:
        core = llm._session._core
    assert isinstance(core, FakeCore)
    assert core.config is not None
    assert core.config.scheduler.max_num_seqs == 3
    assert core.config.scheduler.policy == "priority"
    assert core.config.cache.memory_fraction == 0.5
    assert core.config.model.seed == 9


def test_an_unknown_or_bad_option_is_refused_by_name(model: str) -> None:
    with pytest.raises(UnknownOption, match="max_num_seq .*Did you mean max_num_seqs"):
        LLM(model, max_num_seq=3)
    with pytest.raises(ConfigError, match="block_size=0"):
        LLM(model, block_size=0)


@pytest.mark.parametrize(
    ("is_terminal", "use_tqdm", "is_shown"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_the_progress_bar_is_for_terminals(
    llm: LLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    use_tqdm: bool,
    is_shown: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    llm.generate(["a", "b"], use_tqdm=use_tqdm)
    assert ("Prompts: 100%" in capsys.readouterr().err) == is_shown


def test_the_options_and_the_context_can_be_read_and_not_written(model: str) -> None:
    with LLM(model, max_num_seqs=np.int64(7), speculative_config={"model": "ngram"}) as llm:
        assert llm.max_model_len == llm._session.max_model_len == 64
        assert (llm.config.scheduler.max_num_seqs, llm.config.speculative.method) == (7, "ngram")
        with pytest.raises(AttributeError):
            llm.config = None  # type: ignore[misc, assignment]
        with pytest.raises(AttributeError):
            llm.config.model.seed = 3  # type: ignore[misc]
