"""Tool parsers: the same calls however the text is split, and nothing lost of text that is no call."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.answers import Answer, parsed, patient, split, tools

from penstock.server.answers.tool_format import ToolFormat
from penstock.server.answers.tool_parsers import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    JSON_LIST,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_LIST,
)
from penstock.server.requests.answer import ContentDelta, ToolCallArguments, ToolCallStart

FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "mistral's lists": MISTRAL_LIST,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "json": JSON_LIST,
}
NAMES = ("f", "get_weather", "a.b-c", "function_1", "tool_call")
MARKERS = [marker for format in FORMATS.values() for marker in format.markers]
PIECES = st.sampled_from([*MARKERS, "<tool_", "</", "[", "]", "{", "}", '"', "\\", "\n", " ", ",", "é", "\ud83d\ude00"])
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=6).map("".join)
TEXTS = TEXTS.map(lambda text: text.encode("utf-16", "replace").decode("utf-16", "replace"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    lambda value, ascii, indent: json.dumps(value, ensure_ascii=ascii, indent=indent),
    st.dictionaries(TEXTS, VALUES, max_size=3),
    st.booleans(),
    st.sampled_from([None, 2]),
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), max_size=4)
PARTS_OF_CALLS = st.sampled_from(['{"name": "f"', '"arguments": {}', "f", ": "])
CUTS = st.lists(st.integers(0, 10_000), max_size=40)


def read(format: ToolFormat, pieces: list[str], *, parallel: bool = True) -> Answer:
    return parsed(format.parser(tools(*NAMES), parallel=parallel), pieces)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@patient
@given(content=TEXTS, calls=CALLS, cuts=CUTS)
def test_calls_and_content_are_those_of_the_text_however_it_is_split(
    format: ToolFormat, content: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    if calls and format.starts:
        content = ""
    assume(not any(opener in content for opener in format.openers))
    assume(not format.starts or not content.lstrip().startswith(tuple(format.starts)))
    text = content + (format.written(calls) if calls else "")
    assert read(format, split(text, cuts)) == Answer("", content.rstrip() if calls else content, calls)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@patient
@given(
    pieces=st.lists(PIECES | st.sampled_from(['{"name": "f"', '"arguments": {}', "f", ": "]), max_size=12), cuts=CUTS
)
def test_any_text_is_parsed_alike_at_once_and_in_pieces(format: ToolFormat, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    assert read(format, split(text, cuts)) == read(format, [text])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@patient
@given(calls=CALLS.filter(bool), cuts=CUTS)
def test_without_parallel_calls_only_the_first_call_comes(
    format: ToolFormat, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    assert read(format, split(format.written(calls), cuts), parallel=False) == Answer("", "", calls[:1])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_arguments_come_as_they_are_generated(format: ToolFormat) -> None:
    parser = format.parser(tools("f"), parallel=True)
    text = format.written([("f", '{"city": "Rome"}')])
    begin = text.index('{"city"')
    assert not parser.push(text[:begin])[1:]
    events = [event for char in text[begin:] for event in parser.push(char)]
    pieces = [event.text for event in events if isinstance(event, ToolCallArguments)]
    assert pieces == list('{"city": "Rome"}')


WRITTEN = {
    "Qwen's own whitespace": (
        HERMES,
        'I look it up.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>',
        Answer("", "I look it up.", [("get_weather", '{"city": "Köln"}')]),
    ),
    "no whitespace, and content behind": (
        HERMES,
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n\nDone. ',
        Answer("", "Done. ", [("f", "{}")]),
    ),
    "arguments before the name": (
        HERMES,
        '<tool_call>{"arguments": {"x": [{}]}, "id": {"name": "no"}, "name": "f"}</tool_call>',
        Answer("", "", [("f", '{"x": [{}]}')]),
    ),
    "escapes are kept": (
        HERMES,
        '<tool_call>{"\\u006eame": "f", "arguments": {"a": "\\u00e9\\"}\\\\"}}</tool_call>',
        Answer("", "", [("f", '{"a": "\\u00e9\\"}\\\\"}')]),
    ),
    "arguments that are text": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Answer("", "", [("f", '{"a": 1}')]),
    ),
    "a call without arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', Answer("", "", [("f", "{}")])),
    "null as arguments": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        Answer("", "", [("f", "{}")]),
    ),
    "a brace too many": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>',
        Answer("", "", [("f", "{}")]),
    ),
    "an end that never comes": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        Answer("", "", [("f", '{"a": "b')]),
    ),
    "a marker in a sentence": (
        HERMES,
        "Write <tool_call> first, then </tool_call>.",
        Answer("", "Write <tool_call> first, then </tool_call>.", []),
    ),
    "an object that is no call": (
        HERMES,
        '<tool_call>{"nom": "f"}</tool_call>',
        Answer("", '<tool_call>{"nom": "f"}</tool_call>', []),
    ),
    "arguments that are no object": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": [1]}',
        Answer("", '<tool_call>{"name": "f", "arguments": [1]}', []),
    ),
    "a call after one that is none": (
        HERMES,
        '<tool_call>no</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
        Answer("", "<tool_call>no</tool_call>", [("f", "{}")]),
    ),
    "Llama's with its tag": (
        LLAMA3_JSON,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
        Answer("", "", [("f", '{"a": 1}'), ("get_weather", "{}")]),
    ),
    "Llama's answer in JSON": (
        LLAMA3_JSON,
        '{"name": "Ann", "arguments": {}}',
        Answer("", '{"name": "Ann", "arguments": {}}', []),
    ),
    "Llama's answer with a call inside": (
        LLAMA3_JSON,
        'So: {"name": "f", "parameters": {}}',
        Answer("", 'So: {"name": "f", "parameters": {}}', []),
    ),
    "Mistral's list": (
        MISTRAL_LIST,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "f", "arguments": {}}]',
        Answer("", "", [("f", '{"a": "]"}'), ("f", "{}")]),
    ),
    "Mistral's names": (
        MISTRAL_LIST,
        '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_weather[ARGS]{"b": 2}',
        Answer("", "", [("f", '{"a": 1}'), ("get_weather", '{"b": 2}')]),
    ),
    "Mistral's names with ids": (
        MISTRAL,
        '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}',
        Answer("", "", [("f", '{"a": 1}')]),
    ),
    "Mistral's marker in a sentence": (
        MISTRAL,
        "[TOOL_CALLS] begins calls.",
        Answer("", "[TOOL_CALLS] begins calls.", []),
    ),
    "DeepSeek's V3": (
        DEEPSEEK_V3,
        "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Answer("", "Yes.", [("f", '{"a": "```"}'), ("f", "{}")]),
    ),
    "DeepSeek's V3.1": (
        DEEPSEEK_V31,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        Answer("", "", [("f", '{"a": 1}')]),
    ),
}


@pytest.mark.parametrize(("format", "text", "expected"), WRITTEN.values(), ids=WRITTEN)
def test_text_that_models_write_is_read(format: ToolFormat, text: str, expected: Answer) -> None:
    assert read(format, [text]) == read(format, list(text)) == expected


def test_content_comes_at_once_up_to_what_may_begin_a_marker() -> None:
    parser = HERMES.parser(tools("f"), parallel=True)
    assert parser.push("a < b <tool") == [ContentDelta("a < b")]
    assert parser.push("s> c") == [ContentDelta(" <tools> c")]


@pytest.mark.parametrize(
    ("format", "form"), [(HERMES, r"call_[0-9a-f]{24}"), (MISTRAL, r"[a-zA-Z0-9]{9}")], ids=["OpenAI's", "Mistral's"]
)
def test_each_call_has_an_id_of_its_own(format: ToolFormat, form: str) -> None:
    events = format.parser(tools("f"), parallel=True).push(format.written([("f", "{}")] * 3))
    ids = [event.id for event in events if isinstance(event, ToolCallStart)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(form, id) for id in ids)
