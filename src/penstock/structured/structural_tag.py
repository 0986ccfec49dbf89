"""Structural tags as data: texts whose tagged parts follow formats, in both of vLLM's notations.

The notation with `structures` and `triggers` has one form; the one with `format` composes formats, with the names and
fields of XGrammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.errors import InvalidParameter
from penstock.structured.patterns import PatternError, translate_full_match
from penstock.structured.schema_check import NotEnforced, enforceable
from penstock.structured.schema_walk import shown

_NAME = "structured_outputs.structural_tag"
_TEXTS = "a list of texts, none of them empty"
# Formats are read and written recursively.
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class ConstString:
    """A fixed text. Special tokens in it mean those tokens."""

    value: str


@dataclass(frozen=True, slots=True)
class JSONSchema:
    """JSON by a schema, in enforced keywords."""

    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that matches a pattern, in llguidance's dialect."""

    pattern: str


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any text; within a tag, up to the tag's end."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Formats one after another."""

    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Alternative of several formats."""

    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class Tag:
    """A format between two texts. trigger: part of `begin` that decides for this tag; empty outside triggered tags."""

    begin: str
    content: Format
    end: str
    trigger: str = ""


@dataclass(frozen=True, slots=True)
class TriggeredTags:
    """Free text, in which each trigger goes on as one of its tags. stop_after_first: the first tag ends the text."""

    tags: tuple[Tag, ...]
    stop_after_first: bool = False


@dataclass(frozen=True, slots=True)
class SeparatedTags:
    """Tags with a text between them and nothing else. stop_after_first: one tag at most."""

    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool
    stop_after_first: bool


Format: TypeAlias = ConstString | JSONSchema | Regex | AnyText | Sequence | Or | Tag | TriggeredTags | SeparatedTags


def read_structural_tag(data: Mapping[str, Any]) -> Format:
    """Read the data of a structural tag. Raises InvalidParameter with the JSON pointer of what is wrong."""
    if "format" in data:
        _check_fields("", data, ("type", "format"))
        return _read(data["format"], "/format", 0)
    _check_fields("", data, ("type", "structures", "triggers"))
    triggers = _triggers(data, "")
    tags = [
        _structure(part, f"/structures/{index}", triggers)
        for index, part in enumerate(_listed(data, "structures", "", "parts, each with begin, schema and end"))
    ]
    return TriggeredTags(tuple(tags))


def _structure(part: Any, at: str, triggers: list[str]) -> Tag:
    if not isinstance(part, dict):
        raise _invalid(at, part, "a dictionary with begin, schema and end")
    _check_fields(at, part, ("begin", "schema", "end"))
    begin, end = part.get("begin"), part.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise _invalid(at, part, "begin and end as texts")
    return Tag(begin, _schema(part.get("schema", True), f"{at}/schema"), end, _trigger_of(begin, at, triggers))


def _read(data: Any, at: str, depth: int) -> Format:
    kind = data.get("type") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _READERS:
        raise _invalid(at, data, f"a dictionary whose type is one of {', '.join(_READERS)}")
    if depth > _MAX_DEPTH:
        raise InvalidParameter(f"{_NAME}{at} is nested too deeply. Allowed: {_MAX_DEPTH} formats within each other.")
    fields, reader = _READERS[kind]
    _check_fields(at, data, ("type", *fields))
    return reader(data, at, depth)


def _const_string(data: dict[str, Any], at: str, _depth: int) -> Format:
    return ConstString(_text(data, "value", at))


def _json_schema(data: dict[str, Any], at: str, _depth: int) -> Format:
    return JSONSchema(_schema(data.get("json_schema", True), f"{at}/json_schema").schema)


def _regex(data: dict[str, Any], at: str, _depth: int) -> Format:
    try:
        return Regex(translate_full_match(_text(data, "pattern", at)))
    except PatternError as error:
        raise InvalidParameter(f"{_NAME}{at}/pattern: {error}.") from error


def _any_text(_data: dict[str, Any], _at: str, _depth: int) -> Format:
    return AnyText()


def _sequence(data: dict[str, Any], at: str, depth: int) -> Format:
    return Sequence(_elements(data, at, depth))


def _or(data: dict[str, Any], at: str, depth: int) -> Format:
    return Or(_elements(data, at, depth))


def _elements(data: dict[str, Any], at: str, depth: int) -> tuple[Format, ...]:
    listed = _listed(data, "elements", at, "formats")
    elements = tuple(_read(item, f"{at}/elements/{index}", depth + 1) for index, item in enumerate(listed))
    if any(isinstance(element, AnyText) for element in elements):
        raise _invalid(f"{at}/elements", listed, "any_text as the content of a tag only, whose end shows where it ends")
    return elements


def _tag(data: dict[str, Any], at: str, depth: int) -> Tag:
    content, end = _read(data.get("content"), f"{at}/content", depth + 1), _text(data, "end", at)
    if isinstance(content, AnyText) and not end:
        raise _invalid(f"{at}/end", end, "a text that is not empty, since the content is any text")
    return Tag(_text(data, "begin", at), content, end)


def _triggered_tags(data: dict[str, Any], at: str, depth: int) -> Format:
    if _flag(data, "at_least_one", at):
        raise _invalid(f"{at}/at_least_one", True, "False; use tags_with_separator for tags that must come")
    triggers = _triggers(data, at)
    tags = [
        Tag(tag.begin, tag.content, tag.end, _trigger_of(tag.begin, f"{at}/tags/{index}", triggers))
        for index, tag in enumerate(_tags(data, at, depth))
    ]
    return TriggeredTags(tuple(tags), _flag(data, "stop_after_first", at))


def _tags_with_separator(data: dict[str, Any], at: str, depth: int) -> Format:
    separator = _text({"separator": "", **data}, "separator", at)
    flags = _flag(data, "at_least_one", at), _flag(data, "stop_after_first", at)
    return SeparatedTags(_tags(data, at, depth), separator, *flags)


def _tags(data: dict[str, Any], at: str, depth: int) -> tuple[Tag, ...]:
    tags = []
    for index, item in enumerate(_listed(data, "tags", at, "tags")):
        here = f"{at}/tags/{index}"
        if not isinstance(item, dict) or item.get("type", "tag") != "tag":
            raise _invalid(here, item, "a tag with begin, content and end")
        _check_fields(here, item, ("type", *_READERS["tag"][0]))
        tags.append(_tag(item, here, depth))
    return tuple(tags)


_READERS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any], str, int], Format]]] = {
    "const_string": (("value",), _const_string),
    "json_schema": (("json_schema",), _json_schema),
    "regex": (("pattern",), _regex),
    "any_text": ((), _any_text),
    "sequence": (("elements",), _sequence),
    "or": (("elements",), _or),
    "tag": (("begin", "content", "end"), _tag),
    "triggered_tags": (("triggers", "tags", "at_least_one", "stop_after_first"), _triggered_tags),
    "tags_with_separator": (("tags", "separator", "at_least_one", "stop_after_first"), _tags_with_separator),
}


def _schema(schema: Any, at: str) -> JSONSchema:
    try:
        return JSONSchema(enforceable(schema))
    except NotEnforced as error:
        raise InvalidParameter(f"{_NAME}{at}: {error}") from error


def _triggers(data: Mapping[str, Any], at: str) -> list[str]:
    triggers = data.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(text, str) and text for text in triggers):
        raise _invalid(f"{at}/triggers", triggers, _TEXTS)
    return triggers


def _trigger_of(begin: str, at: str, triggers: list[str]) -> str:
    trigger = next((text for text in triggers if begin.startswith(text)), None)
    if trigger is None:
        raise _invalid(f"{at}/begin", begin, f"a text that begins with a trigger ({', '.join(triggers)})")
    return trigger


def _listed(data: Mapping[str, Any], name: str, at: str, of_what: str) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list) or not value:
        raise _invalid(f"{at}/{name}", value, f"a list of {of_what}")
    return value


def _text(data: Mapping[str, Any], name: str, at: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{at}/{name}", value, "text")
    return value


def _flag(data: Mapping[str, Any], name: str, at: str) -> bool:
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise _invalid(f"{at}/{name}", value, "True or False")
    return value


def _check_fields(at: str, value: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in value:
        if name not in known:
            raise InvalidParameter(f"{_NAME}{at} has a field {name!r}. Allowed: {', '.join(sorted(known))}.")


def _invalid(at: str, value: Any, allowed: str) -> InvalidParameter:
    return InvalidParameter(f"{_NAME}{at}={shown(value)} is not valid. Allowed: {allowed}.")
