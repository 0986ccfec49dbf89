"""LLMEngine: requests come and go between the steps that its caller runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, LLMEngine, PoolingParams, RequestOutputKind, SamplingParams
from penstock.config import EngineConfig
from penstock.engine.arg_utils import EngineArgs
from penstock.engine.session import Session
from penstock.errors import ContextTooLong, InvalidRequest, LifecycleError, UnsupportedFeature
from support.fake_engine import FakeCore, scripted, write_model

FIVE = SamplingParams(max_tokens=5)
PROMPT = [9, 10]


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def engine(tmp_path: Path, core: FakeCore) -> Iterator[LLMEngine]:
    config = EngineConfig.create(str(write_model(tmp_path / "model")))
    engine = LLMEngine(config, Session(config, load_core=lambda config: core))
    yield engine
    engine.close()


def run(engine: LLMEngine) -> list[Any]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_requests_come_between_steps(engine: LLMEngine, core: FakeCore) -> None:
    core.tokens = scripted(70, 71, 72)
    assert engine.step() == []
    assert engine.add_request("a", PROMPT, FIVE) == "a"
    (first,) = engine.step()
    assert (first.request_id, first.finished, first.outputs[0].token_ids) == ("a", False, [70])
    engine.add_request("b", PROMPT, FIVE)
    assert engine.get_num_unfinished_requests() == 2
    outputs = run(engine)
    ends = {output.request_id: len(output.outputs[0].token_ids) for output in outputs if output.finished}
    assert ends == {"a": 5, "b": 5}
    assert engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        (RequestOutputKind.CUMULATIVE, [1, 2, 3, 4, 5]),
        (RequestOutputKind.DELTA, [1, 1, 1, 1, 1]),
        (RequestOutputKind.FINAL_ONLY, [5]),
    ],
)
def test_outputs_are_of_their_kind(engine: LLMEngine, kind: RequestOutputKind, lengths: list[int]) -> None:
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=5, output_kind=kind))
    assert [len(output.outputs[0].token_ids) for output in run(engine)] == lengths


def test_samples_of_one_prompt_are_one_output(engine: LLMEngine) -> None:
    engine.add_request("a", PROMPT, SamplingParams(n=3, max_tokens=2))
    *_, last = run(engine)
    assert [len(completion.token_ids) for completion in last.outputs] == [2, 2, 2]


def test_an_aborted_request_has_no_further_output(engine: LLMEngine, core: FakeCore) -> None:
    for name in "abc":
        engine.add_request(name, PROMPT, FIVE)
    engine.step()
    engine.abort_request(["a", "unknown"])
    engine.abort_request("b")
    assert {output.request_id for output in run(engine)} == {"c"}
    assert core.aborted == ["a", "b"]


def test_a_refused_request_leaves_no_trace(engine: LLMEngine) -> None:
    engine.add_request("a", PROMPT, FIVE)
    with pytest.raises(InvalidRequest, match="request_id='a' is that of a running request"):
        engine.add_request("a", PROMPT, FIVE)
    with pytest.raises(ContextTooLong):
        engine.add_request("b", [9] * 100_000, FIVE)
    with pytest.raises(InvalidRequest, match="request_id=7"):
        engine.add_request(7, PROMPT, FIVE)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeature, match="trace_headers="):
        engine.add_request("c", PROMPT, FIVE, trace_headers={"a": "b"})  # type: ignore[call-arg]
    assert engine.get_num_unfinished_requests() == 1
    assert len(run(engine)) == 5


def test_a_closed_engine_refuses(engine: LLMEngine) -> None:
    engine.add_request("a", PROMPT, FIVE)
    engine.close()
    with pytest.raises(LifecycleError):
        engine.step()


def test_an_offline_engine_has_its_steps() -> None:
    with LLM("demo", max_model_len=64, kv_cache_memory_bytes="1MiB") as llm:
        llm.llm_engine.add_request("a", "ROMEO:", SamplingParams(max_tokens=4, temperature=0))
        (whole,) = llm.generate("ROMEO:", SamplingParams(max_tokens=4, temperature=0))
        *_, last = run(llm.llm_engine)
        assert last.outputs[0].text == whole.outputs[0].text
        assert llm.llm_engine.tokenizer is llm.get_tokenizer()


def test_a_request_can_pool() -> None:
    options = {"runner": "pooling", "convert": "embed", "max_model_len": 64, "kv_cache_memory_bytes": "1MiB"}
    engine = LLMEngine.from_engine_args(EngineArgs("demo", **options))
    try:
        engine.add_request("a", "Hello", PoolingParams())
        (output,) = run(engine)
        assert output.outputs.data.ndim == 1
    finally:
        engine.close()
