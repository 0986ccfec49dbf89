"""Checks of context-free grammars in Lark's notation or GBNF, and translation to Lark's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from penstock.errors import InvalidParameter
from penstock.structured.gbnf import as_lark_text, gbnf_rules, is_gbnf
from penstock.structured.grammar_rules import Kind, Rules, never_ending
from penstock.structured.lark_text import GrammarTextError, LarkToken, lark_rules, lark_tokens
from penstock.structured.schema_check import NotEnforced, enforceable

# Limit of a grammar's rules: llguidance recurses over them, so a long chain takes a deep stack.
MAX_RULES = 1000
MAX_GROUPS = 3000
_MAX_NAMED = 5
# Directives that would bypass the checks here, and rule attributes that cannot be rolled back or constrain nothing.
_REFUSED_KEYWORD = "%llguidance"
_REFUSED_ATTRIBUTES = ("max_tokens", "stop", "temperature")


def as_lark(grammar: str, write_schema: Callable[[dict[str, Any]], str] = json.dumps) -> str:
    """Return a grammar in Lark's notation, with its schemas (`%json`) rewritten to enforced keywords.

    write_schema: writes such a schema as text, with llguidance's options.
    Raises InvalidParameter.
    """
    is_lark = not is_gbnf(grammar)
    try:
        if not is_lark:
            rules = gbnf_rules(grammar)
            _check([rules], "root")
            return as_lark_text(rules)
        tokens = list(lark_tokens(grammar))
    except GrammarTextError as error:
        notation = "Lark's notation" if is_lark else "GBNF"
        raise InvalidParameter(f"structured_outputs.grammar is not valid {notation}: it has {error}.") from error
    _check_tokens(tokens)
    _check(lark_rules(tokens), "start")
    parts, at = [], 0
    for previous, token in pairwise(tokens):
        if previous.text == "%json":
            parts += [grammar[at : token.at], _schema_text(token, write_schema)]
            at = token.at + len(token.text)
    return "".join([*parts, grammar[at:]])


def _check_tokens(tokens: Sequence[LarkToken]) -> None:
    for number, token in enumerate(tokens):
        is_assigned = number + 1 < len(tokens) and tokens[number + 1].text == "="
        if token.text == _REFUSED_KEYWORD or (is_assigned and token.text in _REFUSED_ATTRIBUTES):
            name = f"{token.text}=" if is_assigned else token.text
            raise InvalidParameter(
                f"structured_outputs.grammar has {name}, which cannot be followed here. Allowed: grammars without it."
            )


def _check(grammars: Iterable[Rules], start: str) -> None:
    """Refuse too many rules or groups, and rules that never end. grammars: a grammar and its inner ones."""
    for rules in grammars:
        num_groups = sum(token.kind in (Kind.OPEN, Kind.OPEN_OPTION) for body in rules.values() for token in body)
        for count, limit, what in ((len(rules), MAX_RULES, "rules"), (num_groups, MAX_GROUPS, "groups")):
            if count > limit:
                raise InvalidParameter(
                    f"structured_outputs.grammar has {count:,} {what}. Allowed: at most {limit:,}. Use fewer, such as "
                    "a regular expression with many alternatives in place of many rules."
                )
        endless = never_ending(rules, start)
        if endless:
            named = ", ".join(map(repr, endless[:_MAX_NAMED])) + (" and others" if len(endless) > _MAX_NAMED else "")
            raise InvalidParameter(
                f"structured_outputs.grammar has rules that never end: {named}. Each of their alternatives leads back "
                "to them. Give one of them an alternative that does not."
            )


def _schema_text(token: LarkToken, write_schema: Callable[[dict[str, Any]], str]) -> str:
    """Write a schema of the grammar in enforced keywords."""
    try:
        return write_schema(enforceable(token.value))
    except NotEnforced as error:
        raise InvalidParameter(f"structured_outputs.grammar: %json at position {token.at}: {error}") from error
