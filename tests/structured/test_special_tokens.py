"""Texts that spell a special token: ordinary tokens spell them, and the token itself is what a structural tag names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.structured.backend import Matcher
from support.constraints import END, VOCAB_SIZE, allowed_tokens, demo_tokenizer, matcher_for

NAME, ID = "<|user|>", 4
NAMED = {"type": "object", "properties": {NAME: {"const": 1}}, "required": [NAME]}
# By name: a form that forces the text of a special token, and the output that it forces.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": [f"{NAME}a"]}, f"{NAME}a"),
    "regex": ({"regex": f"x{re.escape(NAME)}"}, f"x{NAME}"),
    "const": ({"json": {"const": NAME}}, f'"{NAME}"'),
    "enum": ({"json": {"enum": [f"a{NAME}"]}}, f'"a{NAME}"'),
    "pattern": ({"json": {"type": "string", "pattern": f"^{re.escape(NAME)}$"}}, f'"{NAME}"'),
    "property": ({"json": NAMED, "disable_any_whitespace": True}, f'{{"{NAME}":1}}'),
    "grammar in Lark's notation": ({"grammar": f'start: "a" {json.dumps(NAME)} "b"'}, f"a{NAME}b"),
    "schema in a grammar": ({"grammar": f"start: %json {json.dumps({'const': NAME})}"}, f'"{NAME}"'),
    "GBNF": ({"grammar": f'root ::= "a" {json.dumps(NAME)} "b"'}, f"a{NAME}b"),
}


def spelt(text: str) -> list[int]:
    """The ordinary tokens that spell a text."""
    as_json = json.loads(demo_tokenizer().as_json() or "")
    return Tokenizer.from_str(json.dumps({**as_json, "added_tokens": []})).encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


def follow(matcher: Matcher, token_ids: list[int]) -> None:
    """Take in tokens, each of which may come. Over the whole vocabulary the matcher accepts what the bitmask allows."""
    for token_id in token_ids:
        allowed = allowed_tokens(matcher)
        assert token_id in allowed
        assert [token for token in range(VOCAB_SIZE) if _accepts(matcher, token)] == allowed
        assert matcher.accept([token_id]) == 1


def _accepts(matcher: Matcher, token_id: int) -> bool:
    num_accepted = matcher.accept([token_id])
    matcher.rollback(num_accepted)
    return num_accepted == 1


def tag(begin: str, end: str, trigger: str) -> dict[str, Any]:
    part = {"begin": begin, "schema": {"const": 1}, "end": end}
    return {"structural_tag": {"structures": [part], "triggers": [trigger]}}


@pytest.mark.parametrize("name", FORMS)
def test_a_forced_text_is_spelt_in_ordinary_tokens(name: str) -> None:
    fields, text = FORMS[name]
    matcher = matcher_for(**fields)
    follow(matcher, spelt(text))
    assert END in allowed_tokens(matcher)


@pytest.mark.parametrize("name", FORMS)
def test_a_text_may_be_spelt_in_single_characters(name: str) -> None:
    fields, text = FORMS[name]
    follow(matcher_for(**fields), [token_id for character in text for token_id in spelt(character)])


@pytest.mark.parametrize(
    ("begin", "end", "trigger", "token_ids"),
    [
        (NAME, "", NAME, [ID]),
        (f"{NAME}>", "", NAME, [ID, *spelt(">")]),
        ("<f>", NAME, "<f>", spelt("<f>")),
        (f"<f{NAME}>", "", "<f", [*spelt("<f"), ID, *spelt(">")]),
        (f"f{NAME}>", "", f"f{NAME}", [*spelt("f"), ID, *spelt(">")]),
        (NAME, "", NAME[:3], [ID]),
        (f"{NAME}{NAME}", "", NAME, [ID, ID]),
        # Triggers that ordinary tokens spell.
        (NAME, NAME, NAME, spelt(NAME)),
        (f"{NAME}>", "", NAME, spelt(f"{NAME}>")),
        (NAME, "", NAME[:3], spelt(NAME)),
    ],
)
def test_a_special_token_that_a_structural_tag_names_is_that_token(
    begin: str, end: str, trigger: str, token_ids: list[int]
) -> None:
    matcher = matcher_for(**tag(begin, end, trigger))
    for _ in range(2):
        follow(matcher, [*spelt("free text "), *token_ids])
        # Then comes the schema, and neither the end nor text.
        one = spelt("1")
        assert allowed_tokens(matcher) == one
        follow(matcher, [*one, *([ID] if end else [])])
    assert END in allowed_tokens(matcher)


def test_a_special_token_that_no_form_names_may_not_come() -> None:
    for fields in ({"regex": "(.|\n)*"}, {"json": {"type": "string"}}, tag("<f>", "", "<f>")):
        matcher = matcher_for(**fields)
        follow(matcher, spelt('"'))
        assert set(allowed_tokens(matcher)).isdisjoint({0, 1, 3, 4, 5})
