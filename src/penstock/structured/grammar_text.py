"""Context-free grammars as users write them: Lark's notation, or GBNF, which is turned into Lark's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidParameter
from penstock.structured.schema_check import NotEnforced, enforceable

# Of a grammar. Libraries follow rules by calling themselves, so a long chain of them takes a deep stack.
MAX_RULES = 1000
MAX_GROUPS = 3000
_RULE = re.compile(r"^[ \t]*[?!]?[\w-]+(?:\.\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
# What cannot be taken back, or is no constraint, or would pass over the checks of this engine.
_REFUSED = {
    r"%llguidance\b": "%llguidance",
    r"\bmax_tokens\s*=": "max_tokens=",
    r"\bstop\s*=": "stop=",
    r"\btemperature\s*=": "temperature=",
}
# Texts, regular expressions, comments, and what is looked for outside of them.
_TOKENS = re.compile(
    r'"(?:\\.|[^"\\\n])*"i?|/(?![/*\s])(?:\\.|[^/\\\n])+/[a-z]*|//[^\n]*|(?<![^\s])#[^\n]*|%json\b|'
    + "|".join(_REFUSED)
)


def check_size(grammar: str) -> None:
    """Refuse grammars of too many rules or groups. Raises InvalidParameter."""
    num_rules, num_groups = len(_RULE.findall(grammar)), sum(map(grammar.count, "(["))
    for count, limit, what in ((num_rules, MAX_RULES, "rules"), (num_groups, MAX_GROUPS, "groups")):
        if count > limit:
            raise InvalidParameter(
                f"structured_outputs.grammar has {count:,} {what}. Allowed: at most {limit:,}. Use fewer, such as a "
                "regular expression with many alternatives in place of many rules."
            )


def as_lark(grammar: str, json_options: Mapping[str, Any]) -> str:
    """A grammar in Lark's notation; the schemas in it (`%json`) in keywords that are enforced.

    json_options: what a schema in it is compiled with.
    Raises InvalidParameter.
    """
    check_size(grammar)
    lark = _from_gbnf(grammar) if is_gbnf(grammar) else grammar
    parts, at = [], 0
    while (found := _TOKENS.search(lark, at)) is not None:
        parts.append(lark[at : found.end()])
        at = found.end()
        if found.group() == "%json":
            schema, at = _schema_at(lark, at)
            options = {"x-guidance": dict(json_options)} if json_options else {}
            parts.append(f" {json.dumps({**schema, **options})}")
        else:
            _check_token(found.group())
    return "".join([*parts, lark[at:]])


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar has rules as GBNF writes them."""
    return re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE) is not None


def _from_gbnf(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar).replace("%llguidance {}", "", 1)
    except Exception as error:
        raise InvalidParameter(f"structured_outputs.grammar is no GBNF: {error}. Allowed: GBNF, or Lark.") from error


def _check_token(token: str) -> None:
    for pattern, name in _REFUSED.items():
        if re.fullmatch(pattern, token):
            raise InvalidParameter(
                f"structured_outputs.grammar has {name}, which cannot be followed here. Allowed: grammars without it."
            )


def _schema_at(lark: str, at: int) -> tuple[dict[str, Any], int]:
    """A schema that begins behind a place, and where it ends."""
    at += len(lark[at:]) - len(lark[at:].lstrip())
    try:
        schema, end = json.JSONDecoder().raw_decode(lark, at)
        return enforceable(schema), end
    except NotEnforced as error:
        raise InvalidParameter(f"structured_outputs.grammar: %json at position {at}: {error}") from error
    except ValueError as error:
        raise InvalidParameter(f"structured_outputs.grammar: %json at position {at} is no JSON: {error}.") from error
