"""Calls as Python writes them: JSON arguments with the values of Python, however the text is split."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.answers import Answer, joined, parsed, patient, split
from tests.support.constraints import allows, matcher_for

from penstock.errors import InvalidParameter
from penstock.server.answers.python_literal import LiteralScanner
from penstock.server.answers.pythonic_format import PythonicFormat
from penstock.server.answers.tool_format import CallableTool

PARAMETERS = {
    "type": "object",
    "properties": {
        "deep": {"type": "boolean"},
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "lines": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["path"],
}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"type": "string"}}}
TOOLS = [CallableTool("open", PARAMETERS), CallableTool("opt", OPTIONAL)]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\"'\\\n)],="), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CUTS = st.lists(st.integers(0, 1000), max_size=30)
PIECES = [*"[]()=\"'\\1{}:\n", "open", "opt", ", ", "path", "a", "<|python_start|>"]
ALLOWED = [
    '[open(path="a")]',
    '[open(path="\\"", deep=True, lines=[1, 2]), opt()]',
    "[opt(b=None)]",
    '[opt(a=1, c="")]',
]
NOT_ALLOWED = [
    "[]",
    "[open()]",
    '[open(path="a", mode="x")]',
    "[opt(, a=1)]",
    "[opt(a='x')]",
    '[open(path="a", deep=1)]',
]


def read(pieces: list[str]) -> Answer:
    return parsed(PythonicFormat().parser(TOOLS, parallel=True), pieces)


def translated(literal: str) -> Any:
    """Value of a literal that comes character by character, by way of JSON."""
    scanner, pending = LiteralScanner(), ""
    for char in f"{literal})":
        pending += char
        pending = pending[scanner.scan(pending, 0) :]
    assert (scanner.done, pending) == (True, ")")
    return json.loads(scanner.take())


@patient
@given(value=VALUES)
def test_a_literal_has_the_value_that_python_gives_it(value: Any) -> None:
    assert translated(repr(value)) == value
    assert translated(json.dumps(value)) == value


LITERALS = [
    "1_000", "+5", "-.5", "0x1F", "1e3", "(1, 2)", "(1,)", "[1, 2,]", "[]", "()", "{'a': (1, None), 'b': {},}",
    "'it\\'s'", "'say \"x\"'", r"'\x41\u00e9\U0001F600\101\0'", r"'\d\a\v\q'", "'a\\\nb'",
    "[True, False, None]", "( 'a' , 'b' )",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*invalid escape sequence")
@pytest.mark.parametrize("literal", LITERALS)
def test_what_only_python_writes_is_translated(literal: str) -> None:
    value = ast.literal_eval(literal)
    assert translated(literal) == json.loads(json.dumps(value))


@patient
@given(path=TEXTS, more=VALUES, num_calls=st.integers(1, 3), cuts=CUTS)
def test_arguments_are_those_of_the_text_however_it_is_split(
    path: str, more: Any, num_calls: int, cuts: list[int]
) -> None:
    calls = ", ".join([f"open(path={path!r}, more={more!r})"] * num_calls)
    answer = read(split(f"[{calls}]", cuts))
    assert answer.content == ""
    expected = [("open", {"path": path, "more": more})] * num_calls
    assert [(name, json.loads(text)) for name, text in answer.calls] == expected


@patient
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), cuts=CUTS)
def test_any_text_is_parsed_alike_at_once_and_in_pieces(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    assert read(split(text, cuts)) == read([text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[open(), opt( a = 1 ,b=None )]", Answer("", "", [("open", "{}"), ("opt", '{"a": 1, "b": null}')])),
        ("<|python_start|>[other(a=1)]<|python_end|>", Answer("", "", [("other", '{"a": 1}')])),
        ("[other(a=1)]", Answer("", "[other(a=1)]", [])),
        ("[1, 2, open]", Answer("", "[1, 2, open]", [])),
        ("[open('a')]", Answer("", "[open('a')]", [])),
        ("[open(path == 1)]", Answer("", "[open(path == 1)]", [])),
        ("So: [open(path='a')]", Answer("", "So: [open(path='a')]", [])),
        ("[open(path='a", Answer("", "", [("open", '{"path": "a')])),
        ("[open", Answer("", "[open", [])),
        ("[open(path='a')]\nThat is it.", Answer("", "That is it.", [("open", '{"path": "a"}')])),
    ],
)
def test_text_that_models_write_is_read(text: str, expected: Answer) -> None:
    assert read([text]) == read(list(text)) == expected


def test_text_comes_as_it_is_generated() -> None:
    parser = PythonicFormat().parser(TOOLS, parallel=True)
    assert joined(parser.push("[open(path='" + "a" * 40)).calls == [("open", '{"path": "' + "a" * 40)]


def test_only_the_first_call_is_kept_where_calls_are_not_parallel() -> None:
    parser = PythonicFormat().parser(TOOLS, parallel=False)
    assert parsed(parser, ["[open(path='a'), open(path='b')]"]).calls == [("open", '{"path": "a"}')]


def test_the_constraint_allows_valid_calls_only() -> None:
    matcher = matcher_for(structural_tag={"format": PythonicFormat().calls(TOOLS, parallel=True)})
    assert [text for text in ALLOWED if not allows(matcher, text)] == []
    assert [text for text in NOT_ALLOWED if allows(matcher, text)] == []
    single = matcher_for(structural_tag={"format": PythonicFormat().calls(TOOLS, parallel=False)})
    assert not allows(single, "[opt(), opt()]")
    free = matcher_for(structural_tag={"format": PythonicFormat().free_text_with_calls(TOOLS, parallel=True)})
    assert allows(free, "Hi [opt(a='x')]")
    assert not allows(free, "[opt(a='x')]")


def test_a_keyword_that_arguments_cannot_follow_is_refused_unless_nothing_is_promised() -> None:
    parameters = {**OPTIONAL, "minProperties": 1}
    with pytest.raises(InvalidParameter, match=r"'f' has minProperties in parameters"):
        PythonicFormat().calls([CallableTool("f", parameters)], parallel=True)
    lenient = CallableTool("f", parameters, must_be_valid=False)
    assert allows(matcher_for(structural_tag={"format": PythonicFormat().calls([lenient], parallel=True)}), "[f(x=1)]")


def test_a_name_that_no_call_can_write_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="the property 'a b'"):
        PythonicFormat().calls([CallableTool("f", {"type": "object", "properties": {"a b": {}}})], parallel=True)
