"""Check of a whole output by its JSON schema, for what was not enforced while it was generated."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from penstock.config.reasoning import HARMONY, REASONING_PARSERS, ReasoningMarkers
from penstock.contract import StructuredOutputsParams
from penstock.structured.backend import TextTokenizer
from penstock.structured.reasoning import after_last, other_spellings
from penstock.structured.schema_walk import escaped

# Keywords that are applied to parts of an instance. A schema may apply them as often as it likes to a short one.
MAX_STEPS = 50_000
# Keywords within keywords: a schema may refer to itself for ever, and Python's stack is bounded.
MAX_DEPTH = 100
_MAX_ERRORS = 10
_MAX_CHARACTERS = 200
# Whole numbers beyond this size stay decimals, since their digits take memory.
_MAX_EXPONENT = 400
# Classes that differ between dialects, but not for plain texts.
_CLASSES = re.compile(r"\\[sSwWdDbB]")
_PLAIN = re.compile(r"[\t\n\r -~]*")
# Begin of the text of a message with a header: the last message is the constrained one.
_MESSAGE = "<|message|>"


class FinalCheck:
    """Check of outputs by the schemas of their requests.

    reasoning: markers of the reasoning that comes before what is constrained; None if nothing does.
    """

    def __init__(self, tokenizer: TextTokenizer, reasoning: ReasoningMarkers | None = None) -> None:
        self._tokenizer = tokenizer
        self._ends: tuple[tuple[int, ...], ...] = ()
        if reasoning is not None:
            marker = _MESSAGE if reasoning == REASONING_PARSERS[HARMONY] else reasoning.end

            def encode(text: str) -> list[int]:
                return tokenizer.encode(text, add_special_tokens=False)

            self._ends = (tuple(encode(marker)), *other_spellings(encode, marker))

    def errors(self, params: StructuredOutputsParams, token_ids: Sequence[int]) -> list[str]:
        """Errors of an output by the schema, each with its JSON pointer."""
        begin = max((after_last(token_ids, end) for end in self._ends), default=-1)
        answer = self._tokenizer.decode(token_ids[max(0, begin) :], skip_special_tokens=True)
        return schema_errors(params.json or "{}", answer)


def schema_errors(schema: str, text: str) -> list[str]:
    """Errors of a text by a schema, each with its JSON pointer in the text.

    Numbers are compared as decimals. Formats are annotations; references lead to no other document. What cannot be
    checked, such as a pattern with lookaround, counts as an error that says so.
    """
    import jsonschema
    import referencing

    try:
        instance = exact_json(text)
    except (ValueError, RecursionError):
        return ["/: this is no complete JSON"]
    try:
        given = exact_json(schema)
        checked = _validator_of(given, jsonschema)(given, registry=referencing.Registry())
        return [_shown(error) for _, error in zip(range(_MAX_ERRORS), checked.iter_errors(instance), strict=False)]
    except Exception as error:  # jsonschema raises errors of many kinds for what it cannot follow
        return [f"/: this could not be checked: {(str(error) or type(error).__name__)[:_MAX_CHARACTERS]}"]


def exact_json(text: str) -> Any:
    """Parse JSON with decimals, which are whole numbers where they can be. Raises ValueError."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | Decimal:
    number = Decimal(text)
    return int(number) if abs(number.adjusted()) < _MAX_EXPONENT and number == number.to_integral_value() else number


def _validator_of(schema: Any, jsonschema: Any) -> Any:
    """Validator of a schema's draft, or of the newest whose form an undeclared one has, in bounded steps."""
    draft = jsonschema.Draft202012Validator
    if isinstance(schema, dict) and "$schema" in schema:
        draft = jsonschema.validators.validator_for(schema, default=draft)
    elif _may_be_old(schema):
        drafts = [draft, jsonschema.Draft7Validator, jsonschema.Draft4Validator]
        draft = next((one for one in drafts if one(one.META_SCHEMA).is_valid(schema)), draft)
    keywords = {"dependencies": jsonschema.Draft7Validator.VALIDATORS["dependencies"], **draft.VALIDATORS}
    keywords |= {"pattern": _pattern, "patternProperties": _pattern_properties}
    return jsonschema.validators.extend(draft, _counted(keywords))


def _may_be_old(schema: Any) -> bool:
    """Whether a keyword has a form that the newest draft does not know."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += part.values()
            bounds = (part.get("exclusiveMinimum"), part.get("exclusiveMaximum"))
            if isinstance(part.get("items"), list) or any(isinstance(bound, bool) for bound in bounds):
                return True
    return False


def _counted(keywords: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    steps, depth = itertools.count(1), [0]

    def counting(check: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Iterator[Any]:
            if next(steps) > MAX_STEPS:
                raise _NotChecked(f"it takes more than {MAX_STEPS:,} steps")
            if depth[0] >= MAX_DEPTH:
                raise _NotChecked(f"it has more than {MAX_DEPTH} keywords within each other")
            depth[0] += 1
            try:
                yield from check(*arguments) or ()
            finally:
                depth[0] -= 1

        return counted

    return {name: counting(check) for name, check in keywords.items()}


class _NotChecked(Exception):
    """Schema that takes too long, or has a pattern that takes unbounded time."""


def _pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if isinstance(instance, str) and not _searched(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Any], instance: Any, _schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for pattern, schema in patterns.items():
        for name, item in instance.items():
            if _searched(pattern, name):
                yield from validator.descend(item, schema, path=name, schema_path=pattern)


def _searched(pattern: str, text: str) -> bool:
    """Whether a pattern is found, in time that is linear in the text."""
    if _CLASSES.search(pattern) and not _PLAIN.fullmatch(text):
        raise _NotChecked(f"dialects do not agree on what {pattern!r} matches in {text!r}")
    return _compiled(pattern).search(text) is not None


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise _NotChecked(f"the pattern {pattern!r} cannot be searched in bounded time") from error


def _shown(error: Any) -> str:
    pointer = "".join(f"/{escaped(str(part))}" for part in error.absolute_path)
    message = error.message
    return f"{pointer or '/'}: {message if len(message) <= _MAX_CHARACTERS else f'{message[:_MAX_CHARACTERS]}...'}"
