"""Constraints as text: what is read in linear time, which grammars never end, and GBNF as llama.cpp reads it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

import penstock.structured.constraint_check as constraint_check
from penstock.contract import StructuredOutputsParams
from penstock.errors import InvalidParameter
from penstock.structured.constraint_check import check_constraint, check_read
from penstock.structured.grammar_text import as_lark
from support.constraints import allows, matcher_for


def _chained(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "null"}}}


# With a scan that is quadratic each of these takes minutes.
LONG: dict[str, dict[str, Any]] = {
    "a regular expression in a grammar": {"grammar": "start: /" + "\\/" * 200_000},
    "groups": {"regex": "(a)" * 160_000},
    "braces": {"regex": "a{" * 500_000},
    "a chain of definitions": {"json": _chained(8_000)},
    "a key twice": {"json": "{" + ", ".join(f'"k{n}": {{}}' for n in (*range(60_000), 59_999)) + "}"},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LONG)
def test_long_constraints_are_read_in_linear_time(name: str) -> None:
    with contextlib.suppress(InvalidParameter):
        params = StructuredOutputsParams(**LONG[name])
        check_constraint(params, 1 << 20)
        check_read(params)


def test_a_long_constraint_is_not_read_where_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(constraint_check, "check_read", lambda params: read.append(params))
    check_constraint(StructuredOutputsParams(regex="a" * 5000), 1 << 20)
    assert read == []
    check_constraint(StructuredOutputsParams(regex="a" * 4000), 1 << 20)
    assert len(read) == 1


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('start: "a" start', "start"),
        ('start: "a" | b\nb: "x" b', "b"),
        ('start: a*\na: "(" c ")"\nc: a', "c"),
        ('root ::= "a" root', "root"),
        ('root ::= "a" (b)\nb ::= ("x" | "y") b', "b"),
    ],
)
def test_rules_that_never_end_are_refused_by_name(grammar: str, rule: str) -> None:
    with pytest.raises(InvalidParameter, match="never end") as refused:
        as_lark(grammar)
    assert repr(rule) in str(refused.value)


@pytest.mark.parametrize("grammar", ['start: "a" start?', 'start: "a" | "b" start', 'root ::= "a" root | "b"'])
def test_rules_that_may_end_are_kept(grammar: str) -> None:
    assert as_lark(grammar)


@pytest.mark.parametrize(
    ("grammar", "matches", "fails"),
    [
        (r'root ::= "\u00e9" "\U0001F600" "\x41"', ["é😀A"], ["e😀A"]),
        (r'root ::= "\]" "\-" "\"" "\\"', [']-"\\'], ["]-"]),
        (r"root ::= [a\-c\]]+", ["a-c]"], ["b"]),
        ('root ::=\n  | "a"\n  | "b"', ["a", "b", ""], ["c"]),
        ('root ::= start "!"\nstart ::= "s" start | "t"', ["sst!"], ["sst"]),
        ("root ::= [^\\n]{2,3} # a comment\n", ["ab", "abc"], ["a"]),
        ('root ::= ("a" | "b")* "." .', ["abab.x"], ["ab"]),
    ],
)
def test_gbnf_means_what_llama_cpp_reads_in_it(grammar: str, matches: list[str], fails: list[str]) -> None:
    matcher = matcher_for(grammar=grammar)
    assert [text for text in matches if not allows(matcher, text)] == []
    assert [text for text in fails if allows(matcher, text)] == []


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('root ::= "a', "a '\"' that is not closed at line 1, column 10"),
        ('root ::= "a"\nroot ::= "b"', "the rule 'root' a second time at line 2"),
        ("root ::= missing", "'missing' in the rule 'root'"),
        ('expr ::= "a"', "no rule 'root'"),
        ("root ::= [b-a]", "a range in the wrong order"),
        (r'root ::= "\q"', "an escape that is not known"),
        ("root ::= *", "nothing to repeat"),
        ("root ::= )", "closes nothing"),
        (r'root ::= "\ud800"', "not a character"),
    ],
)
def test_what_is_no_gbnf_is_refused_with_its_place(grammar: str, said: str) -> None:
    with pytest.raises(InvalidParameter, match="is not valid GBNF") as refused:
        as_lark(grammar)
    assert said in str(refused.value)


def test_a_schema_in_a_grammar_stays_json() -> None:
    lark = as_lark('start: %json {"type": "integer"} "!"')
    schema = lark.removeprefix("start: %json ").removesuffix(' "!"')
    assert json.loads(schema)["type"] == "integer"
