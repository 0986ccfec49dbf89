"""Check of a whole output by its JSON schema, for what was not enforced while it was generated."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from penstock.config.reasoning import HARMONY, REASONING_PARSERS, ReasoningMarkers
from penstock.contract import StructuredOutputsParams
from penstock.structured.backend import TextTokenizer
from penstock.structured.reasoning import after_last, other_spellings
from penstock.structured.schema_walk import escaped

# Applications of keywords to parts of an instance, some 20 us each; large parts count for more.
MAX_STEPS = 20_000
MAX_SCHEMA_CHARACTERS = 1 << 18
# Keywords within keywords: a schema may refer to itself for ever, and Python's stack is bounded.
MAX_DEPTH = 100
_MAX_ERRORS = 10
_MAX_CHARACTERS = 200
# Characters that a step reads or writes, in messages of errors above all.
_CHARACTERS_PER_STEP = 256
# Keywords whose schemas are all applied to the same part, and those whose value comes in a message.
_BRANCHES = {"allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies"}
_LITERALS = {"enum", "const", "not"}
# Whole numbers beyond this size stay decimals, since their digits take memory.
_MAX_EXPONENT = 400
# Classes that differ between dialects, but not for plain texts.
_CLASSES = re.compile(r"\\[sSwWdDbB]")
_BACKTRACKS = re.compile(r"[*+?{(|]")
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
    try:
        instance = exact_json(text)
    except (ValueError, RecursionError):
        return ["/: this is no complete JSON"]
    try:
        if len(schema) > MAX_SCHEMA_CHARACTERS:
            raise _NotChecked(f"the schema has more than {MAX_SCHEMA_CHARACTERS:,} characters")
        given, draft = _schema_and_draft(schema)
        errors = _Bounded(instance, given).validator(draft, given).iter_errors(instance)
        return [_shown(error) for error in itertools.islice(errors, _MAX_ERRORS)]
    except Exception as error:  # jsonschema raises errors of many kinds for what it cannot follow
        return [f"/: this could not be checked: {(str(error) or type(error).__name__)[:_MAX_CHARACTERS]}"]


def exact_json(text: str) -> Any:
    """Parse JSON with decimals, which are whole numbers where they can be. Raises ValueError."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | Decimal:
    number = Decimal(text)
    return int(number) if abs(number.adjusted()) < _MAX_EXPONENT and number == number.to_integral_value() else number


@functools.lru_cache(maxsize=16)
def _schema_and_draft(text: str) -> tuple[Any, Any]:
    """A schema, and the validator of its draft, or of the newest whose form an undeclared one has."""
    import jsonschema

    schema, draft = exact_json(text), jsonschema.Draft202012Validator
    if isinstance(schema, dict) and "$schema" in schema:
        draft = jsonschema.validators.validator_for(schema, default=draft)
    elif _may_be_old(schema):
        drafts = [draft, jsonschema.Draft7Validator, jsonschema.Draft4Validator]
        of_form = (one for one in drafts if _Bounded(schema).validator(one, one.META_SCHEMA).is_valid(schema))
        draft = next(of_form, draft)
    return schema, draft


def _may_be_old(schema: Any) -> bool:
    """Whether a keyword has a form that the newest draft does not know."""
    return any(
        isinstance(part.get("items"), list)
        or isinstance(part.get("exclusiveMinimum"), bool)
        or isinstance(part.get("exclusiveMaximum"), bool)
        for part in _dictionaries(schema)
    )


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """All dictionaries within a value."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            yield part
            left += part.values()


class _NotChecked(Exception):
    """Schema that takes too long, or has a pattern that takes unbounded time."""


class _Bounded:
    """Keywords of a validator in bounded steps. values: all that it may be applied to, or that it may quote."""

    def __init__(self, *values: Any) -> None:
        self._left: float = MAX_STEPS
        self._depth = 0
        self._schema: Any = None
        # By id, of lists and dictionaries, which live as long as the check.
        self._characters: dict[int, int] = {}
        for value in values:
            self._weigh(value)

    def validator(self, draft: Any, schema: Any) -> Any:
        """Validator of a schema that must not look at anything else."""
        import jsonschema
        import referencing

        self._schema = schema
        keywords = {"dependencies": jsonschema.Draft7Validator.VALIDATORS["dependencies"], **draft.VALIDATORS}
        own = (self._pattern, self._patternProperties, self._additionalProperties, self._uniqueItems)
        keywords |= {function.__name__[1:]: function for function in own}
        if "unevaluatedProperties" in keywords:
            unevaluated = functools.partial(self._unevaluated_properties, keywords["unevaluatedProperties"])
            keywords["unevaluatedProperties"] = unevaluated
        counted = {name: functools.partial(self._apply, name, check) for name, check in keywords.items()}
        return jsonschema.validators.extend(draft, counted)(schema, registry=referencing.Registry())

    def _apply(self, name: str, check: Callable[..., Any], validator: Any, value: Any, part: Any, schema: Any) -> Any:
        times = len(value) if name in _BRANCHES else 1
        read = self._size(value) if name in _LITERALS else len(value) if isinstance(value, (dict, list)) else 0
        self._take(self._size(part) * times + read)
        if self._depth >= MAX_DEPTH:
            raise _NotChecked(f"it has more than {MAX_DEPTH} keywords within each other")
        self._depth += 1
        try:
            yield from check(validator, value, part, schema) or ()
        finally:
            self._depth -= 1

    def _take(self, num_characters: int) -> None:
        self._left -= 1 + num_characters / _CHARACTERS_PER_STEP
        if self._left < 0:
            raise _NotChecked(f"it takes more than {MAX_STEPS:,} steps")

    def _weigh(self, value: Any) -> int:
        if isinstance(value, dict):
            size = 2 + sum(len(name) + self._weigh(item) for name, item in value.items())
        elif isinstance(value, list):
            size = 2 + sum(map(self._weigh, value))
        else:
            return self._size(value)
        self._characters[id(value)] = size
        return size

    def _size(self, value: Any) -> int:
        """Characters of a value, about."""
        if isinstance(value, str):
            return 2 + len(value)
        return self._characters.get(id(value), 0) if isinstance(value, (dict, list)) else 8

    def _pattern(self, _validator: Any, pattern: str, part: Any, _schema: Any) -> Iterator[Any]:
        from jsonschema import ValidationError

        if isinstance(part, str) and not _searched(pattern, part):
            yield ValidationError(f"{part!r} does not match {pattern!r}")

    def _patternProperties(  # noqa: N802 - the keyword
        self, validator: Any, patterns: dict[str, Any], part: Any, _schema: Any
    ) -> Iterator[Any]:
        for pattern, schema in patterns.items() if isinstance(part, dict) else ():
            for name in self._matching(part, [pattern]):
                self._take(self._size(part[name]))
                yield from validator.descend(part[name], schema, path=name, schema_path=pattern)

    def _additionalProperties(  # noqa: N802 - the keyword
        self, validator: Any, allowed: Any, part: Any, schema: Any
    ) -> Iterator[Any]:
        from jsonschema import ValidationError

        if not isinstance(part, dict) or allowed is True:
            return
        unlisted = [name for name in part if name not in schema.get("properties", {})]
        matching = set(self._matching(unlisted, schema.get("patternProperties", {})))
        others = [name for name in unlisted if name not in matching]
        if isinstance(allowed, dict):
            for name in others:
                yield from validator.descend(part[name], allowed, path=name)
        elif others:
            yield ValidationError(f"Additional properties are not allowed ({', '.join(map(repr, others))})")

    def _uniqueItems(self, _validator: Any, is_asked: Any, part: Any, _schema: Any) -> Iterator[Any]:  # noqa: N802
        from jsonschema import ValidationError

        if is_asked and isinstance(part, list) and len(set(map(_key, part))) < len(part):
            yield ValidationError(f"{part!r} has non-unique elements")

    def _unevaluated_properties(
        self, check: Callable[..., Any], validator: Any, value: Any, part: Any, schema: Any
    ) -> Iterator[Any]:
        # The library itself searches patterns of the schema and of what it refers to, by backtracking.
        if isinstance(part, dict) and any(map(_BACKTRACKS.search, self._patterns_within(schema))):
            raise _NotChecked("unevaluatedProperties with patternProperties that repeat or choose")
        yield from check(validator, value, part, schema) or ()

    def _patterns_within(self, schema: Any) -> Iterator[str]:
        """Patterns of `patternProperties` in a schema, or in all of them if it refers to others."""
        parts = list(_dictionaries(schema))
        if any(name in one for one in parts for name in ("$ref", "$dynamicRef", "$recursiveRef")):
            parts = list(_dictionaries(self._schema))
        self._take(len(parts))
        return (pattern for one in parts for pattern in one.get("patternProperties", ()))

    def _matching(self, names: Iterable[str], patterns: Iterable[str]) -> Iterator[str]:
        for name in names:
            for pattern in patterns:
                self._take(len(name))
                if _searched(pattern, name):
                    yield name
                    break


def _key(value: Any) -> Any:
    """A value that can be hashed, and is equal for equal JSON only: 1 is 1.0, and neither is true."""
    if isinstance(value, dict):
        return frozenset((name, _key(item)) for name, item in value.items())
    return tuple(map(_key, value)) if isinstance(value, list) else (type(value) is bool, value)


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
