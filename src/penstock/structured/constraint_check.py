"""Checks of constraints before they are compiled, at request intake."""

from __future__ import annotations

import re
from typing import Any

from penstock.contract import StructuredOutputsParams
from penstock.contract.structured_outputs import MAX_READ_AT_INTAKE, parsed
from penstock.errors import InvalidParameter
from penstock.structured.grammar_text import as_lark
from penstock.structured.patterns import PatternError, translate_full_match
from penstock.structured.schema_check import NotEnforced, enforceable
from penstock.structured.structural_tag import Format, read_structural_tag

# A space, or a newline and up to 20 spaces: JSON in one line or indented, and no endless whitespace.
DEFAULT_WHITESPACE = r"[ ]|\x{a}[ ]{0,20}"


def check_constraint(params: StructuredOutputsParams, max_bytes: int) -> None:
    """Refuse a constraint that cannot be enforced, as far as it shows without compiling.

    Constraints longer than `MAX_READ_AT_INTAKE` are only measured: reading takes time that grows with the length, so
    the compiling threads do it (`check_read`), and the request ends with the error.

    max_bytes: maximum size of the constraint as text.
    Raises InvalidParameter.
    """
    name = params.constraint
    value = getattr(params, name)
    texts = value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
    size = sum(len(text.encode()) for text in (*texts, params.whitespace_pattern or ""))
    if size > max_bytes:
        raise InvalidParameter(
            f"structured_outputs.{name} has {size:,} bytes. Allowed: at most {max_bytes:,}. Make it smaller, or start "
            f"the engine with max_grammar_bytes={size}."
        )
    if size <= MAX_READ_AT_INTAKE:
        check_read(params)


def check_read(params: StructuredOutputsParams) -> None:
    """Refuse a constraint of any length that cannot be enforced, without compiling. Raises InvalidParameter."""
    if params.whitespace_pattern is not None:
        whitespace(params.whitespace_pattern)
    if params.json is not None:
        schema_of(params)
    elif params.regex is not None:
        translated("regex", params.regex)
    elif params.grammar is not None:
        as_lark(params.grammar)
    elif params.structural_tag is not None:
        format_of(params)


def schema_of(params: StructuredOutputsParams) -> Any:
    """Return the schema of `json` or `json_object` in enforced keywords. Raises InvalidParameter."""
    schema = {"type": "object"} if params.json is None else parsed("json", params.json)
    try:
        return enforceable(schema, drops=params.unenforced == "check")
    except NotEnforced as error:
        if not error.can_be_dropped:
            raise
        instead = 'or unenforced="check", which generates without it and says in the result what does not hold.'
        message = f"{str(error).removesuffix('.')}, {instead}"
        raise NotEnforced(message, pointers=error.pointers, keywords=error.keywords) from error


def translated(name: str, pattern: str) -> str:
    """Translate a regular expression for the whole text. name: of the parameter. Raises InvalidParameter."""
    try:
        return translate_full_match(pattern)
    except PatternError as error:
        raise InvalidParameter(f"structured_outputs.{name}: {error}.") from error


def whitespace(pattern: str) -> str:
    """Translate a pattern of JSON's whitespace. Raises InvalidParameter for any other pattern."""
    found = translated("whitespace_pattern", pattern)
    for part in (r"\\x\{(20|9|a|d)\}", r"\{\d+(,\d*)?\}", r"\(\?:|[()|*+?]|\[(?!\^)|\]"):
        found = re.sub(part, "", found)
    if found:
        raise InvalidParameter(
            f"structured_outputs.whitespace_pattern={pattern!r} is not valid. Allowed: patterns of spaces, \\t, \\n "
            "and \\r, since nothing else is whitespace in JSON; for example '[ \\t]*'."
        )
    return translated("whitespace_pattern", pattern)


def whitespace_of(params: StructuredOutputsParams) -> str:
    """Pattern of the allowed whitespace between JSON tokens; empty for none."""
    if params.disable_any_whitespace:
        return ""
    return DEFAULT_WHITESPACE if params.whitespace_pattern is None else whitespace(params.whitespace_pattern)


def format_of(params: StructuredOutputsParams) -> Format:
    """Read the structural tag. Raises InvalidParameter."""
    return read_structural_tag(parsed("structural_tag", params.structural_tag or "{}"))
