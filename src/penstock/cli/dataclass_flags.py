"""Flags of a command for the fields of an options class, with the help texts of its docstring."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from penstock.checkpoints.json_file import parse_json_text
from penstock.cli.docstrings import meanings_in
from penstock.cli.flags import with_dashes
from penstock.errors import ConfigError


@functools.cache
def _types(options_class: type) -> dict[str, Any]:
    return typing.get_type_hints(options_class)


def parameters_of(options_class: type, flags: Mapping[str, str]) -> list[inspect.Parameter]:
    """Parameters of a command, one per field. flags: those with another name than the field's, by field.

    A tuple is a repeatable flag, a dictionary is JSON text, and None is a field that was not given.
    """
    fields = dataclasses.fields(options_class)
    meanings = meanings_in(options_class.__doc__, [field.name for field in fields])
    return [_parameter(options_class, field, meanings.get(field.name, ""), flags.get(field.name)) for field in fields]


def create(options_class: type, given: dict[str, Any], **values: Any) -> Any:
    """Options from a command's arguments, which are removed from `given`. values: those of other fields.

    Raises ConfigError.
    """
    for field in dataclasses.fields(options_class):
        value = given.pop(field.name, None)
        if value is None:
            continue
        kind = _types(options_class)[field.name]
        if typing.get_origin(kind) is tuple:
            value = tuple(value)
        elif _is_mapping(kind):
            value = _parsed(field.name, value)
        values[field.name] = value
    return options_class(**values)


def _parameter(options_class: type, field: dataclasses.Field[Any], meaning: str, flag: str | None) -> inspect.Parameter:
    kind = _types(options_class)[field.name]
    declared = flag or f"--{with_dashes(field.name)}"
    metavar = None
    if typing.get_origin(kind) is tuple:
        kind = list[str]
    elif _is_mapping(kind):
        kind, metavar = str, "JSON"
    elif kind is bool:
        declared = f"{declared}/--no-{declared[2:]}"
    elif typing.get_origin(kind) is types.UnionType:
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    option = typer.Option(declared, help=_help(meaning, field), metavar=metavar)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind | None, option], default=None
    )


def _help(meaning: str, field: dataclasses.Field[Any]) -> str:
    text = meaning[:1].upper() + meaning[1:]
    default = field.default
    if default in (dataclasses.MISSING, None, False, "", ()):
        return text
    shown = ", ".join(default) if isinstance(default, tuple) else default
    return f"{text}  [default: {shown}]"


def _is_mapping(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _parsed(name: str, text: str) -> dict[str, Any]:
    try:
        value = parse_json_text(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={text!r} is not valid. Allowed: a JSON object.")
    return value
