"""Calls with a tag per argument: JSON arguments by the schema, however the text is split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.answers import Answer, joined, parsed, patient, split
from tests.support.constraints import allows, matcher_for

from penstock.errors import InvalidParameter
from penstock.server.answers.tool_format import CallableTool
from penstock.server.answers.xml_format import XMLFormat

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "more": {},
    },
    "required": ["path"],
}
TOOLS = [CallableTool("open", PARAMETERS)]
MARKERS = ["</parameter", "<parameter=", "</function>", "</tool_call>", "<tool_call>"]
PIECES = st.sampled_from([*MARKERS, "\n", '"', "\\", "{"])
PARTS_OF_CALLS = st.sampled_from(["<function=", "open>", "path>", "</parameter>"])
TEXTS = st.lists(PIECES | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=5).map("".join)
VALUES = st.none() | st.booleans() | st.integers() | st.lists(st.integers(), max_size=3)
CUTS = st.lists(st.integers(0, 1000), max_size=30)


def written(arguments: dict[str, Any]) -> str:
    tags = [
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in arguments.items()
    ]
    return f"<tool_call>\n<function=open>\n{''.join(tags)}</function>\n</tool_call>"


def read(pieces: list[str]) -> Answer:
    return parsed(XMLFormat().parser(TOOLS, parallel=True), pieces)


@patient
@given(path=TEXTS, mode=st.sampled_from(["r", "w"]), more=VALUES, num_calls=st.integers(1, 3), cuts=CUTS)
def test_arguments_are_those_of_the_text_however_it_is_split(
    path: str, mode: str, more: Any, num_calls: int, cuts: list[int]
) -> None:
    assume("</parameter>" not in path)
    arguments = {"path": path, "mode": mode, "more": more}
    text = "Hi.\n" + "\n".join([written(arguments)] * num_calls)
    answer = read(split(text, cuts))
    assert answer.content == "Hi."
    assert [(name, json.loads(text)) for name, text in answer.calls] == [("open", arguments)] * num_calls


@patient
@given(pieces=st.lists(PIECES | PARTS_OF_CALLS, max_size=12), cuts=CUTS)
def test_any_text_is_parsed_alike_at_once_and_in_pieces(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    assert read(split(text, cuts)) == read([text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<function=open><parameter=path>a</parameter></function>", Answer("", "", [("open", '{"path": "a"}')])),
        ("<tool_call><function=open></function></tool_call>", Answer("", "", [("open", "{}")])),
        (
            "<function=open><parameter=more>True</parameter><parameter=x>a b</parameter></function>",
            Answer("", "", [("open", '{"more": true, "x": "a b"}')]),
        ),
        ("<function=open><parameter=path>a\n</par", Answer("", "", [("open", '{"path": "a')])),
        ("<function=a<b>", Answer("", "<function=a<b>", [])),
        ("Use <tool_call> here", Answer("", "Use <tool_call> here", [])),
    ],
)
def test_text_that_models_write_is_read(text: str, expected: Answer) -> None:
    assert read([text]) == read(list(text)) == expected


def test_text_comes_as_it_is_generated() -> None:
    parser = XMLFormat().parser(TOOLS, parallel=True)
    events = parser.push("<tool_call>\n<function=open>\n<parameter=path>\n" + "a" * 40)
    assert joined(events).calls == [("open", '{"path": "' + "a" * 40)]


def test_the_constraint_allows_valid_calls_only() -> None:
    matcher = matcher_for(structural_tag={"format": XMLFormat().calls(TOOLS, parallel=False)})
    assert allows(matcher, written({"path": 'a\n<b> "c"'}))
    assert allows(matcher, written({"path": "", "mode": "r", "lines": [1, 2]}))
    assert not allows(matcher, written({"mode": "r"}))
    assert not allows(matcher, written({"path": "a", "mode": "x"}))
    assert not allows(matcher, written({"path": "a", "lines": "b"}))
    free = matcher_for(structural_tag={"format": XMLFormat().free_text_with_calls(TOOLS, parallel=True)})
    assert allows(free, "Hi " + written({"path": "a"}) + " and " + written({"path": "b"}))
    assert not allows(free, written({"mode": "r"}))


def test_a_keyword_that_tags_cannot_follow_is_refused() -> None:
    tool = CallableTool("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}})
    with pytest.raises(InvalidParameter, match=r"'f' has pattern in parameters.properties.a"):
        XMLFormat().calls([tool], parallel=True)


def test_a_keyword_that_tags_cannot_follow_leaves_arguments_free_where_nothing_is_promised() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}
    tools = [CallableTool("open", parameters, must_be_valid=False)]
    matcher = matcher_for(structural_tag={"format": XMLFormat().calls(tools, parallel=True)})
    assert allows(matcher, written({"b": "a"}))
