"""Prompts in any container of token ids, and the errors of invalid ones."""

from __future__ import annotations

import array
import asyncio
import sys
from collections import UserDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch

from penstock import LLM, AsyncEngine, SamplingParams
from penstock.contract import Part, parts, register_part
from penstock.engine.inputs.prompts import TextPair, list_of_prompts, with_parts
from penstock.errors import InvalidRequest, UnsupportedParameter
from penstock.features.lora.request import LoRARequest, parts_of_adapter
from support.fake_engine import FakeCore, install_fake_core, write_model

SHORT = SamplingParams(max_tokens=1)
ONE_PROMPT = [
    numpy.array([5, 6, 7]),
    numpy.array([5, 6, 7], dtype=numpy.uint8),
    numpy.array([5, 6, 7], dtype=object),
    torch.tensor([5, 6, 7]),
    torch.tensor([5, 6, 7], dtype=torch.int32),
    array.array("q", [5, 6, 7]),
    range(5, 8),
    (5, 6, 7),
    deque([5, 6, 7]),
    [numpy.int64(5), numpy.int32(6), 7],
    list(torch.tensor([5, 6, 7])),
    {5: 5, 6: 6, 7: 7}.values(),
]
SEVERAL = [
    numpy.array([[5, 6], [7, 8]]),
    torch.tensor([[5, 6], [7, 8]]),
    [numpy.array([5, 6]), torch.tensor([7, 8])],
    [range(5, 7), (7, 8)],
    [{"prompt_token_ids": numpy.array([5, 6])}, {"prompt_token_ids": torch.tensor([7, 8]), "prompt": "shown"}],
    [{"prompt_token_ids": [5, 6], "multi_modal_data": None}, UserDict(prompt_token_ids=[7, 8])],
]
NOT_IDS: list[tuple[Any, str]] = [
    (numpy.array([5.0, 6.0]), r"5.0 \(float\) at position 0.*Allowed: integers"),
    (torch.tensor([5, 6]).bfloat16(), r"5.0 \(float\) at position 0"),
    (torch.tensor([True, False]), r"True \(bool\) at position 0"),
    ([numpy.bool_(True), numpy.int64(5)], r"True \(bool\) at position 0"),
    ([5, numpy.float64(0.5)], r"0.5 \(float\) at position 1"),
    (numpy.array([5, -1]), "token id -1.*0 to 399"),
    ({"prompt_token_ids": torch.tensor([[5, 6]])}, "a list at position 0 of its token ids, so it has several rows"),
    ({"prompt_token_ids": {5, 6}}, "is a set"),
    ({"prompt": "x", "multi_modal_data": {"image": 1}}, "has multi_modal_data, which this model does not take"),
    ({"prompt_embeds": torch.zeros(2, 3)}, "prompt_embeds is not allowed .* enable_prompt_embeds=True"),
    (
        UserDict(input_ids=[5]),
        "'input_ids'. A tokenizer's result is not a prompt; give its input_ids as prompt_token_ids",
    ),
    (
        {"role": "user", "content": "x"},
        "'role'. Messages are for chat. Allowed: prompt, prompt_token_ids, cache_salt, parts",
    ),
    ({"prompt": "x", "parts": "adapter"}, "parts='adapter' is a str. Allowed: a dictionary by feature"),
    ({"prompt": "x", "parts": {"unknown": {}}}, "There is no part 'unknown'. Allowed:"),
]


@pytest.fixture(autouse=True)
def _fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core()


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }};{% endfor %}")
    with LLM(folder) as llm:
        yield llm


def core_of(llm: LLM) -> FakeCore:
    core = llm._session._core
    assert isinstance(core, FakeCore)
    return core


def prompts_of(llm: LLM) -> list[list[int]]:
    """Prompts that reached the core, as lists of integers."""
    token_ids = [request.prompt_token_ids for request in core_of(llm).added]
    assert all(type(token_id) is int for prompt in token_ids for token_id in prompt)
    return token_ids


async def stream(folder: Path, prompt: Any) -> list[int]:
    # In this process, where the fake core is.
    async with AsyncEngine(folder, enable_multiprocessing=False) as engine:
        return [output async for output in engine.generate(prompt, SHORT)][-1].prompt_token_ids


@pytest.mark.parametrize("prompt", ONE_PROMPT, ids=lambda prompt: type(prompt).__name__)
def test_ids_are_one_prompt_in_whatever_holds_them(llm: LLM, tmp_path: Path, prompt: Any) -> None:
    llm.generate(prompt, SHORT)
    llm.generate({"prompt_token_ids": prompt}, SHORT)
    llm.generate(["a", prompt], SHORT)
    assert [prompts_of(llm)[index] for index in (0, 1, 3)] == [[5, 6, 7]] * 3
    assert asyncio.run(stream(tmp_path / "model", prompt)) == [5, 6, 7]


class _Adapter(Part, frozen=True, kw_only=True):
    feature: ClassVar[str] = "adapter"
    name: str


def test_parts_reach_the_core_with_their_types(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_types", {})
    register_part(_Adapter)
    llm.generate([{"prompt": "a", "parts": given} for given in ({"adapter": _Adapter(name="x")}, None)], SHORT)
    llm.generate({"prompt": "a", "parts": {"adapter": {"name": "x"}}}, SHORT)
    assert [request.parts for request in core_of(llm).added] == [
        {"adapter": _Adapter(name="x")},
        None,
        {"adapter": _Adapter(name="x")},
    ]


@pytest.mark.parametrize("prompts", SEVERAL, ids=lambda prompts: type(prompts).__name__)
def test_rows_are_prompts(llm: LLM, prompts: Any) -> None:
    llm.generate(prompts, SHORT)
    assert prompts_of(llm) == [[5, 6], [7, 8]]


def test_iterators_are_read_once(llm: LLM) -> None:
    llm.generate((token_id for token_id in (5, 6, 7)), SHORT)
    llm.generate(iter([[5], (6, 7)]), iter([SHORT, SHORT]))
    assert prompts_of(llm) == [[5, 6, 7], [5], [6, 7]]
    texts = [output.prompt for output in llm.generate((text for text in ("a", "b")), SHORT)]
    assert texts == ["a", "b"]
    assert [output.prompt for output in llm.generate(numpy.array(["a", "b"]), SHORT)] == ["a", "b"]
    conversations = ([{"role": "user", "content": text}] for text in ("a", "b"))
    assert [output.prompt for output in llm.chat(conversations, SHORT)] == ["a;", "b;"]
    assert llm.chat(iter([{"role": "user", "content": "a"}]), SHORT)[0].prompt == "a;"


def test_an_array_of_nothing_is_no_prompt() -> None:
    assert list_of_prompts(numpy.array([], dtype=int)) == []


@pytest.mark.parametrize(("prompt", "message"), NOT_IDS)
def test_what_is_no_prompt_is_refused_by_what_is_wrong(llm: LLM, tmp_path: Path, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, SHORT)
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: .*" + message):
        llm.generate(["fine", prompt], SHORT)
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(stream(tmp_path / "model", prompt))
    assert core_of(llm).added == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (numpy.array(5), "prompts is a ndarray"),
        (b"text", "prompts is a bytes"),
        ({"a", "b"}, "prompts is a set"),
        (numpy.zeros((2, 2, 2), dtype=int), r"prompts\[0\]: The prompt has a list at position 0"),
        (["a", b"b"], r"prompts\[1\]: The prompt is a bytes"),
    ],
)
def test_what_holds_no_prompts_is_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, SHORT)


def test_an_async_engine_takes_one_prompt(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with pytest.raises(InvalidRequest, match=r"so it has several rows.*LLM\.generate takes several prompts"):
        asyncio.run(stream(folder, numpy.array([[5, 6], [7, 8]])))


def test_parts_are_added_to_prompts_of_each_kind() -> None:
    (part,) = parts_of_adapter(LoRARequest("mine", 1, "folder"))
    assert with_parts("a", []) == "a"
    assert with_parts("a", [part]) == {"prompt": "a", "parts": {"lora": part}}
    assert with_parts([1, 2], [part]) == {"prompt_token_ids": [1, 2], "parts": {"lora": part}}
    given = {"prompt": "a", "parts": {"other": 1}}
    assert with_parts(given, [part]) == {"prompt": "a", "parts": {"other": 1, "lora": part}}  # type: ignore[arg-type]
    assert given == {"prompt": "a", "parts": {"other": 1}}
    with pytest.raises(UnsupportedParameter, match="pairs of texts"):
        with_parts(TextPair("a", "b"), [part])
