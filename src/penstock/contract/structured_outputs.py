"""Structured outputs: constraint on the form of a request's output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.contract import param_checks as check
from penstock.contract.named_parameters import NamedParameters
from penstock.errors import InvalidParameter

# Constraints, of which a request has exactly one.
CONSTRAINTS = ("json", "regex", "choice", "grammar", "structural_tag", "json_object")
# Constraints with JSON schemas.
CONSTRAINTS_BY_SCHEMA = ("json", "json_object", "structural_tag")
# What becomes of keywords of a schema that cannot be enforced.
UNENFORCED = ("refuse", "check")
_A_SCHEMA = "a JSON schema as text, a dictionary, True, False, or a pydantic model"
_A_TAG = "a structural tag as JSON text or a dictionary"
# JSON fields: allowed values, for errors, and types of the parsed data.
_JSON_FIELDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "json": (_A_SCHEMA, (dict, bool)),
    "structural_tag": (_A_TAG, (dict,)),
}
# Longest constraint, in characters, that is parsed at construction. Longer ones are parsed by the compiler threads,
# since the caller may be an event loop.
MAX_READ_AT_INTAKE = 4096


class StructuredOutputsParams(
    msgspec.Struct, metaclass=NamedParameters, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Form of an output, as exactly one constraint, with the names that users of vLLM know.

    json: a JSON schema: text, a dictionary, or a pydantic model (its class or an instance). Kept as text.
    regex: a regular expression that the whole output matches.
    choice: the output is one of these texts.
    grammar: a context-free grammar, in Lark's notation or in GBNF.
    structural_tag: free text with parts that follow schemas, each after its trigger:
        {"structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}. Kept as text.
    json_object: the output is any JSON object.

    whitespace_pattern: with JSON: a regular expression of the whitespace allowed at a place; None takes the engine's,
        which is bounded.
    disable_any_whitespace: with JSON: no whitespace but that inside of strings.
    disable_additional_properties: with JSON: where a schema says nothing of further properties, objects have none, and
        strings, arrays and numbers without bounds get default ones. False generates all that is valid.
    unenforced: with json: what becomes of keywords that cannot be enforced. "refuse" refuses the request; "check"
        generates without them, and `CompletionOutput.schema_errors` says what does not hold of the whole output. None
        takes the engine's, `structured_outputs_unenforced`.

    Raises InvalidParameter. Whether a schema can be enforced is checked when an engine accepts the request.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    json_object: bool = False
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    unenforced: str | None = None

    def __post_init__(self) -> None:
        flag: object = self.json_object
        # vLLM's default.
        if flag is None:
            self._set("json_object", False)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            check.check_flag(_full(name), getattr(self, name))
        given = self._check_only_one()
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(_full(name), getattr(self, name))
        if self.json is not None:
            self._set("json", _json_text("json", _schema_of(self.json)))
        if self.structural_tag is not None:
            self._set("structural_tag", _json_text("structural_tag", self.structural_tag))
        if self.choice is not None:
            self._set("choice", _choices(self.choice))
        self._check_options(given)

    @property
    def constraint(self) -> str:
        """Name of the constraint."""
        return next(name for name in CONSTRAINTS if self._has(name))

    def _has(self, name: str) -> bool:
        # The schema False is a constraint; the flag False is none.
        value = getattr(self, name)
        return value is not None and not (name == "json_object" and value is False)

    def _check_only_one(self) -> str:
        given = [name for name in CONSTRAINTS if self._has(name)]
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "has no constraint"
            raise InvalidParameter(f"structured_outputs {found}. Allowed: exactly one of {', '.join(CONSTRAINTS)}.")
        return given[0]

    def _check_options(self, given: str) -> None:
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            if getattr(self, name) and given not in CONSTRAINTS_BY_SCHEMA:
                raise check.invalid(_full(name), getattr(self, name), f"only with {', '.join(CONSTRAINTS_BY_SCHEMA)}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            allowed = "not together with disable_any_whitespace, which leaves no whitespace to describe"
            raise check.invalid(_full("whitespace_pattern"), self.whitespace_pattern, allowed)
        if not self.disable_additional_properties and given not in CONSTRAINTS_BY_SCHEMA:
            allowed = f"False only with {', '.join(CONSTRAINTS_BY_SCHEMA)}"
            raise check.invalid(_full("disable_additional_properties"), False, allowed)
        if self.unenforced is not None and self.unenforced not in UNENFORCED:
            raise check.invalid(_full("unenforced"), self.unenforced, f"{', '.join(UNENFORCED)}, or None")
        if self.unenforced == "check" and given != "json":
            raise check.invalid(_full("unenforced"), self.unenforced, '"check" only with json')

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)


def structured_outputs_from(value: Any) -> StructuredOutputsParams | None:
    """Convert the argument of a request: the struct, a dictionary of its fields, or None.

    Raises InvalidParameter.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise check.invalid("structured_outputs", value, "StructuredOutputsParams, or a dictionary of its fields")
    for name in value:
        if name not in StructuredOutputsParams.__struct_fields__:
            allowed = ", ".join(StructuredOutputsParams.__struct_fields__)
            raise InvalidParameter(f"structured_outputs has a field {check.shown(name)}. Allowed: {allowed}.")
    return StructuredOutputsParams(**value)


def _full(name: str) -> str:
    return f"structured_outputs.{name}"


def _check_text(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise check.invalid(name, value, "a text that is not empty")
    _check_encodable(name, value)


def _check_encodable(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        wrong = text[error.start : error.end]
        raise InvalidParameter(f"{name} has {wrong!r}, which is not a character. Allowed: text without it.") from None


def _choices(value: Any) -> tuple[str, ...]:
    name = _full("choice")
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(text, str) and text for text in value):
        raise check.invalid(name, value, "a list of texts, none of them empty")
    for text in value:
        _check_encodable(name, text)
    return tuple(dict.fromkeys(value))


def _schema_of(value: Any) -> Any:
    """Return the schema of a pydantic model or instance; anything else unchanged."""
    describe = getattr(value, "model_json_schema", None)
    return describe() if callable(describe) else value


def parsed(name: str, text: str) -> Any:
    """Parse `json` or `structural_tag`. Raises InvalidParameter for invalid JSON or data of a wrong type."""
    allowed, types = _JSON_FIELDS[name]
    with _invalid_json(name):
        data = _parse(text)
    if not isinstance(data, types):
        raise check.invalid(_full(name), text, allowed)
    return data


def _json_text(name: str, value: Any) -> str:
    """Normalise JSON text: no spaces, keys in their order, which the output follows.

    Text longer than MAX_READ_AT_INTAKE is unchanged.
    """
    allowed, types = _JSON_FIELDS[name]
    if isinstance(value, str):
        _check_encodable(_full(name), value)
        if len(value) > MAX_READ_AT_INTAKE:
            return value
        value = parsed(name, value)
    elif not isinstance(value, types):
        raise check.invalid(_full(name), value, allowed)
    with _invalid_json(name):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    _check_encodable(_full(name), text)
    if len(text) <= MAX_READ_AT_INTAKE:
        parsed(name, text)
    return text


@contextmanager
def _invalid_json(name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RecursionError) as error:
        allowed, _ = _JSON_FIELDS[name]
        raise InvalidParameter(f"{_full(name)} is not valid JSON: {error}. Allowed: {allowed}.") from error


def _parse(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {twice!r} twice")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")
