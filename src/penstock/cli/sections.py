"""Sections of a command's options: dataclasses whose fields are flags.

The field says all of its flag: name, type and default; the help is the meaning in the class's docstring, or "help" of
the field's metadata (`penstock.config.flags.listed`). Other metadata: "flag", another name, None for a field without a
flag; "aliases", further names; "metavar", the form of values, which an integer's makes texts too; "hidden";
"json_list", whose values may be JSON lists.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Annotated, Any

import typer

from penstock.checkpoints.json_file import parse_json_text, shown
from penstock.cli.docstrings import meanings_in
from penstock.errors import ConfigError


def with_dashes(name: str) -> str:
    """Spell an option with dashes."""
    return name.replace("_", "-")


def parse_json(name: str, text: str) -> Any:
    """Parse JSON. name: of the flag. Raises ConfigError for invalid JSON."""
    try:
        return parse_json_text(text)
    except ValueError as error:
        raise ConfigError(
            f'{name} {shown(text)} is not valid: {error}. Allowed: JSON, such as {{"key": 1}}.'
        ) from error


def parse_value(value: str) -> Any:
    """Parse a value: JSON or a constant of Python if possible, else text."""
    python_constants = {"True": True, "False": False, "None": None}
    if value in python_constants:
        return python_constants[value]
    try:
        return parse_json_text(value)
    except ValueError:
        return value


@dataclasses.dataclass(frozen=True)
class Section:
    """Flags of a dataclass. prefix: begin of the parameters' names. only_listed: without fields that have no help."""

    options_class: type
    prefix: str = ""
    only_listed: bool = False

    def fields(self) -> list[Field[Any]]:
        fields = [one for one in dataclasses.fields(self.options_class) if one.metadata.get("flag", "") is not None]
        return [field for field in fields if not self.only_listed or "help" in field.metadata]

    def parameters(self) -> list[inspect.Parameter]:
        """Parameters of a command, with the default None: an option that is not given."""
        return [self._parameter(field) for field in self.fields()]

    def take(self, given: dict[str, Any]) -> dict[str, Any]:
        """Values of the fields that were given, out of a command's arguments. Raises ConfigError."""
        values = {field: given.pop(self.prefix + field.name, None) for field in self.fields()}
        return {field.name: self._value(field, text) for field, text in values.items() if text not in (None, [], ())}

    def _kind(self, field: Field[Any]) -> Any:
        kind = _types(self.options_class)[field.name]
        if isinstance(kind, types.UnionType):
            kind = next(one for one in typing.get_args(kind) if one is not type(None))
        return typing.get_origin(kind) or kind

    def _value(self, field: Field[Any], given: Any) -> Any:
        kind = self._kind(field)
        if kind is tuple:
            return tuple(one for text in given for one in self._values(field, text))
        if issubclass(kind, Mapping):
            return parse_json(_flag(field), given)
        return parse_value(given) if kind is int and field.metadata.get("metavar") else given

    def _values(self, field: Field[Any], text: str) -> list[Any]:
        """Values of a repeatable flag's text: itself, or a JSON list's."""
        is_list = field.metadata.get("json_list") and text.startswith("[")
        return list(parse_json(_flag(field), text)) if is_list else [text]

    def _parameter(self, field: Field[Any]) -> inspect.Parameter:
        kind, metavar = self._kind(field), field.metadata.get("metavar")
        declared = [field.metadata.get("flag") or f"--{with_dashes(field.name)}", *field.metadata.get("aliases", ())]
        if kind is tuple:
            kind = list[str]
        elif issubclass(kind, Mapping):
            kind, metavar = str, metavar or "JSON"
        elif kind is int and metavar is not None:
            kind = str
        elif kind is bool and not field.metadata.get("flag"):
            declared = [f"{declared[0]}/--no-{declared[0][2:]}"]
        hidden = "hidden" in field.metadata
        option = typer.Option(*declared, help=self._help(field), metavar=metavar, hidden=hidden)
        return inspect.Parameter(
            self.prefix + field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kind | None, option],
            default=None,
        )

    def _help(self, field: Field[Any]) -> str:
        meaning = _meanings(self.options_class).get(field.name, "")
        text = str(field.metadata.get("help") or meaning[:1].upper() + meaning[1:])
        default = field.default
        if default is dataclasses.MISSING or default is False or default in (None, "", ()) or "[default: " in text:
            return text
        return f"{text}  [default: {', '.join(default) if isinstance(default, tuple) else default}]"


class Sections:
    """Sections among a function's parameters; parameters: those of its command, with the sections' flags.

    A parameter of a dataclass gets the section's options; one that is Annotated[dict, its class] those that are given.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.parameters: list[inspect.Parameter] = []
        self._sections: dict[str, tuple[Section, bool]] = {}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            kind = parameter.annotation
            options_class = next(iter(getattr(kind, "__metadata__", ())), kind)
            if isinstance(options_class, type) and dataclasses.is_dataclass(options_class):
                self._sections[name] = Section(options_class), options_class is kind
                self.parameters += self._sections[name][0].parameters()
            else:
                self.parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def take(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the sections' parameters, out of those of the command. Raises ConfigError."""
        values = {name: section.take(given) for name, (section, _) in self._sections.items()}
        return {
            name: section.options_class(**values[name]) if is_whole else values[name]
            for name, (section, is_whole) in self._sections.items()
        }


@functools.cache
def _types(options_class: type) -> dict[str, Any]:
    return typing.get_type_hints(options_class)


@functools.cache
def _meanings(options_class: type) -> dict[str, str]:
    return meanings_in(options_class.__doc__, [field.name for field in dataclasses.fields(options_class)])


def _flag(field: Field[Any]) -> str:
    return field.metadata.get("flag") or f"--{with_dashes(field.name)}"
