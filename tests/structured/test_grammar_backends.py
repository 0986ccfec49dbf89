"""Matchers follow outputs token by token, can be taken back, and let nothing but the end come when there is no more."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from penstock.config import StructuredOutputsConfig
from penstock.contract import StructuredOutputsParams
from penstock.errors import InvalidParameter, InvalidRequest, UnsupportedFeature
from penstock.structured import llguidance_backend
from penstock.structured.backend import ConstraintTooLarge
from penstock.structured.constraint_check import check_constraint, check_read
from penstock.structured.llguidance_backend import LLGuidanceBackend
from support.constraints import (
    END,
    NUM_WORDS,
    allowed_tokens,
    allows,
    compiled_beside,
    demo_backend,
    encode,
    matcher_for,
    schema_matcher,
)

NUMBER = 'root ::= sign? [0-9]+\nsign ::= "-" | "+"\n'


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"regex": "[0-9]{3}-[a-z]+"}, ["123-a", "000-zz"], ["12-a", "123-", "123-a "]),
        ({"regex": "^(yes|no)$"}, ["yes", "no"], ["yesno", ""]),
        ({"choice": ["yes", "no", 'say "x"\n', "ünï"]}, ["yes", 'say "x"\n', "ünï"], ["y", "yesno", ""]),
        ({"grammar": NUMBER}, ["-12", "3"], ["-", "", "--1"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}']),
        ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
        ({"json": {"type": "array"}, "whitespace_pattern": "\t?"}, ["[1,\t2]", "[1,2]"], ["[1, 2]", "[1,\t\t2]"]),
    ],
)
def test_each_kind_of_constraint_is_followed(fields: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    matcher = matcher_for(**fields)
    assert [allows(matcher, text) for text in right] == [True] * len(right)
    assert [allows(matcher, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "a" NUMBER\nNUMBER: /[0-9]+/ // digits\n', "a1", "a"),
        ('start: "<" %json {"type": "integer"} ">"', "<5>", "<a>"),
        (
            'start: %json {"properties": {"a": {}}, "type": "object", "allOf": [{"properties": {"b": {}}}]}',
            '{"a":1,"b":2}',
            '{"b":1,"a":2}',
        ),
    ],
)
def test_a_grammar_in_larks_notation_is_followed(grammar: str, right: str, wrong: str) -> None:
    matcher = matcher_for(grammar=grammar)
    assert allows(matcher, right)
    assert not allows(matcher, wrong)


def test_whitespace_is_bounded_unless_a_pattern_says_otherwise() -> None:
    matcher = schema_matcher({"type": "array"})
    assert allows(matcher, "[ 1,\n  2 ]")
    assert allows(matcher, f"[\n{' ' * 20}1]")
    for endless in ("[  1]", "[\n\n1]", f"[\n{' ' * 21}1]", "[\t1]"):
        assert not allows(matcher, endless)
    assert allows(schema_matcher({"type": "array"}, whitespace_pattern="[ \n\t]+"), f"[\n\n\t{' ' * 50}1]")
    for text in (" []", "[] "):
        assert not allows(matcher, text)


def test_a_structural_tag_constrains_what_stands_behind_its_triggers_and_nothing_else() -> None:
    tag = {
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    matcher = matcher_for(structural_tag=tag)
    for text in ("", "Hello\nyou", 'so <f=a>5</f> and <f=b>"x"</f>.', "1 < 2"):
        assert allows(matcher, text), text
    for text in ("<f=c>5</f>", "<f=a>x</f>", "<f=a>5", '<f=b>"y"</f>'):
        assert not allows(matcher, text), text


def test_where_the_output_is_complete_the_end_alone_may_come() -> None:
    matcher = matcher_for(regex="ab?")
    assert allowed_tokens(matcher) != [END]
    assert not matcher.is_terminated
    (a,), (b,) = encode("a"), encode("b")
    assert matcher.accept([a]) == 1
    assert END in allowed_tokens(matcher)
    assert b in allowed_tokens(matcher)
    assert matcher.accept([b]) == 1
    assert allowed_tokens(matcher) == [END]
    assert matcher.is_terminated
    assert matcher.accept([b]) == 0
    assert matcher.accept([END, END]) == 2
    assert allowed_tokens(matcher) == [END]
    assert matcher.accept([a]) == 0


def test_the_end_may_not_come_before_the_output_is_complete() -> None:
    matcher = matcher_for(regex="ab")
    assert END not in allowed_tokens(matcher)
    assert matcher.accept([END]) == 0
    assert allows(matcher, "ab")


def test_a_bitmask_allows_what_is_accepted_and_nothing_else() -> None:
    matcher = schema_matcher({"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]})
    for token_id in [*encode('{"ab": 12}'), END]:
        allowed = set(allowed_tokens(matcher))
        for other in range(0, 1536, 3):
            accepted = matcher.accept([other])
            matcher.rollback(accepted)
            assert bool(accepted) == (other in allowed)
        assert token_id in allowed
        assert matcher.accept([token_id]) == 1


@pytest.mark.parametrize("num_tokens", [1, 3, 7])
def test_what_is_taken_back_leaves_no_trace(num_tokens: int) -> None:
    matcher = schema_matcher({"type": "array", "items": {"type": "integer"}})
    token_ids = [*encode("[1,2,3]"), END, END]
    states = [allowed_tokens(matcher)]
    for token_id in token_ids:
        assert matcher.accept([token_id]) == 1
        states.append(allowed_tokens(matcher))
    matcher.rollback(num_tokens)
    assert allowed_tokens(matcher) == states[len(token_ids) - num_tokens]
    assert matcher.accept(token_ids[-num_tokens:]) == num_tokens
    assert allowed_tokens(matcher) == states[-1]
    matcher.rollback(len(token_ids))
    assert allowed_tokens(matcher) == states[0]


def test_what_is_not_accepted_leaves_no_trace() -> None:
    matcher = matcher_for(regex="[0-9]{3}")
    assert matcher.accept([*encode("1"), *encode("x"), *encode("2")]) == 1
    assert allows(matcher, "23")


def test_matchers_of_one_grammar_know_nothing_of_each_other() -> None:
    grammar = demo_backend().compile(StructuredOutputsParams(regex="[0-9]x"))
    first, second = grammar.start(), grammar.start()
    assert first.accept(encode("1")) == 1
    assert allows(second, "5x")
    assert allows(first, "x")


def _check_and_read(fields: dict[str, Any], max_bytes: int) -> None:
    params = StructuredOutputsParams(**fields)
    check_constraint(params, max_bytes)
    check_read(params)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"regex": "a(?!b)"}, "regex: 'a(?!b)' has a negative lookahead"),
        ({"grammar": "root ::= ("}, "is not valid GBNF"),
        ({"grammar": 'start: %json {"uniqueItems": true}'}, "/uniqueItems"),
        ({"grammar": "start: %json {"}, "invalid JSON after"),
        ({"grammar": 'start: a\na[max_tokens=5]: "x"'}, "max_tokens="),
        ({"grammar": '%llguidance {"no_forcing": true}\nstart: "a"'}, "%llguidance"),
        ({"grammar": "start: a0\n" + "\n".join(f'a{n}: "x" a{n + 1}' for n in range(1000))}, "has 1,001 rules"),
        ({"grammar": f'start: {"(" * 3001}"a"{")" * 3001}'}, "has 3,001 groups"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "/structures=[]"),
        ({"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["["]}}, "/structures/0/begin="),
        ({"structural_tag": {"structures": [{"begin": "<", "x": 1}], "triggers": ["<"]}}, "field 'x'"),
        (
            {"structural_tag": {"structures": [{"begin": "<", "schema": {"$dynamicRef": "#a"}}], "triggers": ["<"]}},
            "structural_tag/structures/0/schema",
        ),
        ({"json": {}, "whitespace_pattern": "(?=a)"}, "whitespace_pattern"),
        ({"json": {}, "whitespace_pattern": "[ x]"}, "whitespace_pattern='[ x]'"),
        ({"json": {}, "whitespace_pattern": "[^ ]"}, "whitespace_pattern='[^ ]'"),
        ({"json": {}, "whitespace_pattern": "a{2}"}, "whitespace_pattern='a{2}'"),
        ({"json": {}, "whitespace_pattern": r"\s*"}, "whitespace_pattern="),
        ({"regex": "[0-9]{9}{9}"}, "nothing to repeat"),
        ({"regex": "a" * 1001}, "has 1,001 bytes. Allowed: at most 1,000"),
        ({"choice": ["a" * 400, "b" * 700]}, "has 1,100 bytes"),
    ],
)
def test_what_reading_tells_is_refused_before_anything_is_compiled(fields: dict[str, Any], said: str) -> None:
    max_bytes = 10**6 if "grammar" in fields else 1000
    with pytest.raises(InvalidParameter) as refused:
        _check_and_read(fields, max_bytes)
    assert said in str(refused.value)
    assert "structured_outputs." in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grammar": "start: b"}, "cannot be enforced"),
        ({"grammar": "start: X\nX: /a/ & /b/"}, "leaves nothing that could come next"),
    ],
)
def test_what_cannot_be_compiled_is_an_error_that_says_so(fields: dict[str, Any], said: str) -> None:
    params = StructuredOutputsParams(**fields)
    check_constraint(params, max_bytes=1000)
    with pytest.raises(InvalidParameter) as refused:
        demo_backend().compile(params)
    assert said in str(refused.value)


def test_words_beyond_the_tokens_of_the_grammar_are_cleared() -> None:
    matcher = matcher_for(choice=["a"])
    words = np.full(NUM_WORDS, -1, np.int32)
    matcher.fill(words)
    assert sum(int(word).bit_count() for word in words.view(np.uint32)) == 1


def test_a_large_schema_is_compiled_and_followed() -> None:
    properties = {f"property_{index}": {"enum": [f"value_{index}", None]} for index in range(1000)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    matcher = schema_matcher(schema)
    assert allows(matcher, json.dumps({name: item["enum"][0] for name, item in properties.items()}))


def test_thousands_of_choices_are_followed() -> None:
    choices = [f"choice {number}" for number in range(3000)]
    matcher = matcher_for(choice=(*choices, "choice 7 of 9", "a/b\n"))
    assert all(allows(matcher, text) for text in (*choices[::500], "choice 7", "choice 7 of 9", "a/b\n"))
    assert not any(allows(matcher, text) for text in ("", "choice", "choice 3000", "choice 7 of"))


def test_a_limit_that_the_first_tokens_meet_is_met_when_the_grammar_is_compiled() -> None:
    rules = "\n".join(f'r{number}: "{number}" r{number} | "x"' for number in range(900))
    with pytest.raises(InvalidParameter, match="at one place too much could come next"):
        matcher_for(grammar=f'start: "a" ({" | ".join(f"r{number}" for number in range(900))})\n{rules}')


def test_a_limit_that_is_met_later_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_backend, "_MAX_ITEMS", 100)
    matcher = matcher_for(grammar='start: item start | item\nitem: "a" | "b"')
    with pytest.raises(ConstraintTooLarge, match=r"\* or \+, or with the recursion first"):
        matcher.accept(encode("ab" * 100))


def test_patterns_that_repeat_too_much_are_the_requests_own_error() -> None:
    matcher = matcher_for(regex="((((a{1,100}){1,100}){1,100}){1,100})")
    with pytest.raises(ConstraintTooLarge, match="its patterns repeat too much within each other"):
        matcher.accept(encode("a" * 60))
    assert issubclass(ConstraintTooLarge, InvalidRequest)


@pytest.mark.parametrize("rule", ['a{}: "x" a{} | "y"', 'a{} ::= "x" a{} | "y"'])
def test_a_long_chain_of_rules_is_compiled_where_it_is_compiled(rule: str) -> None:
    """Not by the caller: it takes a deep stack."""
    rules = [rule.format(number, number + 1) for number in range(990)]
    sign = "::=" if "::=" in rule else ":"
    grammar = "\n".join([f"{'root' if '::=' in rule else 'start'} {sign} a0", *rules, f'a990 {sign} "z"'])
    assert allows(compiled_beside(grammar=grammar).start(), "x" * 300 + "y")


def test_definitions_that_contain_each_other_do_not_grow_without_bound() -> None:
    """Branches of a oneOf take the place of references, up to a size."""
    definitions: dict[str, Any] = {"40": {"const": "end"}}
    for number in range(40):
        branch = {"type": "object", "required": ["k"]}
        refer = {"$ref": f"#/$defs/{number + 1}"}
        definitions[str(number)] = {
            "oneOf": [
                {**branch, "properties": {"k": {"const": "a"}, "v": {"oneOf": [refer, {"type": "null"}]}}},
                {**branch, "properties": {"k": {"const": "b"}, "v": {"oneOf": [refer, {"type": "null"}]}}},
            ]
        }
    with pytest.raises(InvalidParameter, match="oneOf"):
        schema_matcher({"$defs": definitions, "$ref": "#/$defs/0"})


@pytest.mark.parametrize("name", ["auto", "guidance", "xgrammar"])
def test_other_backends_of_vllm_mean_llguidance_and_the_log_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    config = StructuredOutputsConfig(structured_outputs_backend=name)
    assert dataclasses.replace(config).structured_outputs_backend == "llguidance"
    (record,) = caplog.records
    said = f"structured_outputs_backend='{name}' is taken as 'llguidance', the only backend of structured outputs."
    assert record.getMessage() == said


def test_nothing_but_end_tokens_may_follow_an_end_token() -> None:
    matcher = matcher_for(regex="[0-9]+")
    assert matcher.accept([*encode("1"), END]) == 2
    assert matcher.accept(encode("2")) == 0
    assert matcher.accept([END]) == 1


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_a_token_that_is_longer_than_the_librarys_is_named(kind: str) -> None:
    tokens = ["a", "b" * 2000]
    vocabulary = dict(zip(tokens, range(2), strict=True)) if kind == "BPE" else [[token, 0.0] for token in tokens]
    with pytest.raises(UnsupportedFeature, match="a token of 2,000 bytes"):
        LLGuidanceBackend(json.dumps({"model": {"type": kind, "vocab": vocabulary}}), 2, [0])


def test_a_tokenizer_that_the_library_does_not_read_is_named() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(UnsupportedFeature, match="not for this model: llguidance cannot read its tokenizer .*decoder"):
        LLGuidanceBackend(tokenizer.to_str(), 2, [0])


def test_right_recursion_of_gbnf_is_followed_for_as_long_as_the_output_goes_on() -> None:
    """It is written as a repetition: llguidance takes time for each item so far, and reaches a limit after 1,000."""
    matcher = matcher_for(grammar='root ::= "<" list ">"\nlist ::= | item "," list | item\nitem ::= "a" | "b" item')
    assert all(allows(matcher, text) for text in ("<>", "<a>", "<a,>", "<a,bba>", f"<{'a,ba,' * 1500}a>"))
    assert not any(allows(matcher, text) for text in ("<a,,a>", "<,>", "<aa>", "<a,b>", "a"))


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        # What follows a repetition may be what it repeats.
        ('root ::= a "x"\na ::= "x" a | "x"', ["xx", "xxx"], ["x", ""]),
        ('root ::= ("x" root) | "y"', ["y", "xxy"], ["x"]),
        ('root ::= "x" root? | "y"', ["x", "xx", "xy", "y"], ["yx"]),
        ('root ::= "(" root ")" root | "y"', ["y", "(y)y", "((y)y)(y)y"], ["(y)"]),
        ('root ::= root "x" root | "y"', ["y", "yxy", "yxyxy"], ["yx"]),
        ('root ::= "x" root | "z" root | other | "y"\nother ::= "[" root "]"', ["y", "xzy", "x[zy]"], ["x", "[y]y"]),
        ('root ::= "x" root', [], []),
    ],
)
def test_recursion_of_gbnf_means_the_same_as_a_repetition(grammar: str, right: list[str], wrong: list[str]) -> None:
    if not right:
        with pytest.raises(InvalidParameter, match="never end"):
            matcher_for(grammar=grammar)
        return
    matcher = matcher_for(grammar=grammar)
    assert [allows(matcher, text) for text in [*right, *wrong]] == [True] * len(right) + [False] * len(wrong)
