"""vLLM's names and values in Penstock's: renamed, ignored or refused, by the table in vllm.toml.

The table is read where a name or a value is not Penstock's own, so that other programs do not pay for it.
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from penstock.config.checks import did_you_mean
from penstock.errors import (
    ConfigError,
    InvalidParameter,
    UnsupportedArgument,
    UnsupportedMethod,
    UnsupportedName,
    UnsupportedParameter,
)

_TABLE = Path(__file__).with_suffix(".toml")
_KINDS = ("options", "parameters", "arguments", "methods", "names", "commands", "fields", "parts", "modules")
# Keys of a feature with names that ask for it, and the kind of those names.
_ASKING = {**{kind: kind for kind in _KINDS}, "flags": "options", "defaults": "options"}
_MAX_SHOWN = 80

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Feature(NamedTuple):
    """Feature that Penstock does not have. instead: what to do, as a sentence. of_commands: not of engines."""

    name: str
    planned: bool
    instead: str
    of_commands: bool = False

    def refusal(self, said: str) -> str:
        """Message that refuses an argument which asks for the feature."""
        planned = "planned" if self.planned else "not planned"
        return f"{said} asks for {self.name}, which Penstock does not have ({planned}). {self.instead}"


class Entry(NamedTuple):
    """Name that asks for a feature. harmless: values that ask for nothing, besides None and what is empty.

    A collection asks for nothing where all of its values do.
    """

    feature: Feature
    harmless: tuple[Any, ...]
    is_flag: bool

    def asks_for_nothing(self, value: Any) -> bool:
        value = _plain(value)
        if value is None:
            return True
        if isinstance(value, (str, int, float)):
            return value == "" or value in self.harmless
        values = value.values() if isinstance(value, dict) else value
        return isinstance(value, (list, tuple, dict, set, frozenset)) and all(map(self.asks_for_nothing, values))


class Table(NamedTuple):
    """same, other_names: Penstock's names, by kind of name. values: Penstock's, by option and vLLM's value.
    ignored: names without an effect, by kind ("options", "flags", "parameters", "arguments").
    allowed: values of ignored options that are checked all the same, as texts, by option.
    lists: options that take several values, by kind ("options").
    modules: names of each module that only vLLM has. homes: of names that penstock itself does not have, as
        "module:name". programs: commands of modules.
    entries: by kind of name ("options", "parameters", "arguments", "methods", "names", "commands", "fields", "parts",
        "modules").
    refused_values: by option of Penstock's.
    """

    same: Mapping[str, list[str]]
    other_names: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Mapping[str, str]]
    ignored: Mapping[str, list[str]]
    allowed: Mapping[str, list[str]]
    lists: Mapping[str, list[str]]
    modules: Mapping[str, list[str]]
    homes: Mapping[str, str]
    programs: Mapping[str, str]
    features: list[Feature]
    entries: Mapping[str, Mapping[str, Entry]]
    refused_values: Mapping[str, Mapping[str, Feature]]


@functools.cache
def table() -> Table:
    """Table of vllm.toml."""
    import tomllib

    content = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    entries: dict[str, dict[str, Entry]] = {kind: {} for kind in _KINDS}
    refused: dict[str, dict[str, Feature]] = {}
    features = []
    for group in content["features"]:
        feature = Feature(group["name"], group["planned"], group["instead"], of_commands="commands" in group)
        features.append(feature)
        for key, kind in _ASKING.items():
            for name, values in _named(group.get(key, ()), (False,) if key == "flags" else ()):
                is_flag = bool(values) and all(isinstance(value, bool) for value in values)
                entries[kind][name] = Entry(feature, values, is_flag)
        for option, values in group.get("values", {}).items():
            refused.setdefault(option, {}).update(dict.fromkeys(values, feature))
    lists = {name: content[name] for name in Table._fields if name in content and name != "features"}
    return Table(**lists, features=features, entries=entries, refused_values=refused)


def options_as_ours(options: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Engine options by Penstock's names and with its values, without those that ask for nothing. Unknown ones stay.

    known: Penstock's names. Raises UnsupportedArgument, naming the feature, for what Penstock does not have.
    """
    ignored = {*table().ignored["options"], *table().ignored["flags"]}
    ours: dict[str, Any] = {}
    for name, value in options.items():
        own_name, _, key = table().other_names["options"].get(name, name).partition(".")
        if key:
            if value is None:
                continue
            if options.get(own_name):
                raise ConfigError(f"{name} is given beside {own_name}. Put {key} into {own_name}.")
            ours[own_name] = {**ours.get(own_name, {}), key: value}
        elif own_name in known:
            own_value = _value_as_ours(own_name, value)
            # vLLM's None takes the default, as does an option that is not given.
            if own_value is not None:
                ours[own_name] = own_value
        elif name in ignored:
            # A dictionary has vLLM's settings of compilation: -O.mode=3.
            allowed = table().allowed.get(name, [])
            if value and allowed and not isinstance(value, Mapping) and str(value) not in allowed:
                raise ConfigError(f"{_said(name, value)} is not valid. Allowed: {', '.join(allowed)}.")
            if value:
                _log(f"{_said(name, value)} is an option of vLLM's that has no effect here.")
        elif (entry := table().entries["options"].get(name)) is None:
            ours[name] = value
        elif not entry.asks_for_nothing(value):
            raise UnsupportedArgument(entry.feature.refusal(_said(name, value)))
    return ours


def parameters_as_ours(parameters: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Parameters of a request by Penstock's names, without those that ask for nothing; unknown ones stay.

    known: Penstock's names. Raises UnsupportedParameter, naming the feature, for what Penstock does not have, and
    InvalidParameter for a parameter that is given by several names.
    """
    other_names = table().other_names["parameters"]
    renamed = {
        name: _value_as_ours(name, value)
        for name, value in parameters.items()
        if name in other_names and name not in known
    }
    own = {name: value for name, value in parameters.items() if name not in renamed}
    asked = {name: value for name, value in renamed.items() if value is not None}
    for name, value in asked.items():
        own_name, _, field = other_names[name].partition(".")
        if parameters.get(own_name) is not None or (not field and len(asked) > 1):
            others = ", ".join(asked)
            raise InvalidParameter(f"{own_name} is given by several names: {others}. Give {own_name} alone.")
        own[own_name] = {**(own.get(own_name) or {}), field: value} if field else value
    return _without_harmless("parameters", own, known)


def fields_as_ours(prompt: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Fields of a prompt by Penstock's names; see `parameters_as_ours`."""
    return _without_harmless("fields", prompt, known)


def check_kind_of_part(name: str, kind: Any) -> None:
    """Raise UnsupportedParameter if parts of messages of this type ask for a feature. name: of the part, in errors."""
    if isinstance(kind, str) and (entry := table().entries["parts"].get(kind)) is not None:
        raise UnsupportedParameter(entry.feature.refusal(f"{name} of type {kind!r}"))


def also_from_vllm(method: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Decorator of a method that accepts vLLM's further arguments where they ask for nothing.

    The method raises UnsupportedParameter, naming the feature, for values that ask for one.
    """
    code = method.__code__
    known = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])

    @functools.wraps(method)
    def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if kwargs.keys() <= known:
            return method(*args, **kwargs)
        own: Any = _without_harmless("arguments", kwargs, known)
        for name in own:
            if name not in known:
                what = f"{method.__qualname__}() got an unexpected keyword argument {name!r}."
                raise TypeError(f"{what}{did_you_mean(name, known)}")
        return method(*args, **own)

    return call


class RefusesMethods:
    """Base class that refuses methods of vLLM's which Penstock does not have, by feature."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            missing = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                methods = table().entries["methods"]
                for cls in type(self).__mro__:
                    entry = methods.get(f"{cls.__name__}.{name}") or methods.get(name)
                    if entry is not None:
                        raise UnsupportedMethod(entry.feature.refusal(f"{type(self).__name__}.{name}"))
            raise AttributeError(missing, name=name, obj=self)


def name_as_ours(name: str) -> str | None:
    """Penstock's name for a name of vLLM's package; None for a name of neither.

    Raises UnsupportedName for what Penstock does not have.
    """
    if (entry := table().entries["names"].get(name)) is not None:
        raise UnsupportedName(entry.feature.refusal(name))
    return table().other_names["names"].get(name)


def attribute(module: str, name: str) -> Any:
    """A name of a module of the table. Raises AttributeError; UnsupportedName for a feature that Penstock lacks."""
    package, _, path = module.partition(".")
    if name in table().modules.get(path, ()):
        home, _, own_name = table().homes.get(name, f"{package}:{name}").partition(":")
        return getattr(importlib.import_module(home), own_name)
    if name.startswith("VLLM_"):
        own = table().other_names["environment"].get(name)
        instead = "docs/options.md explains all options." if own is None else f"Use {own}."
        raise UnsupportedName(f"{name} is a variable of vLLM's, which nothing reads here. {instead}")
    if not name.startswith("_"):
        name_as_ours(name)  # refuses it by feature
    raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)


def check_module(path: str) -> None:
    """Raise UnsupportedName for a module of vLLM's that asks for a feature. path: without the package's name."""
    for name, entry in table().entries["modules"].items():
        if f"{path}.".startswith(f"{name}."):
            raise UnsupportedName(entry.feature.refusal(f"The module {path}"))


def command_as_ours(name: str) -> str:
    """Penstock's name of a command. Raises UnsupportedArgument for one that Penstock does not have."""
    if (entry := table().entries["commands"].get(name)) is not None:
        raise UnsupportedArgument(entry.feature.refusal(f"The command {name}"))
    return table().other_names["commands"].get(name, name)


def log_variables(names: Iterable[str]) -> None:
    """Log which environment variables of vLLM's have no effect, and which options replace them."""
    ours = table().other_names["environment"]
    said = [f"{name} (here: {ours[name]})" if name in ours else name for name in names]
    if said:
        _log(f"Environment variables of vLLM's have no effect here: {', '.join(said)}.")


def _named(names: Any, harmless: tuple[Any, ...]) -> list[tuple[str, tuple[Any, ...]]]:
    """Names under a key of the table, each with the values that ask for nothing. harmless: for names without values."""
    if not isinstance(names, dict):
        return [(name, harmless) for name in names]
    return [(name, tuple(value) if isinstance(value, list) else (value,)) for name, value in names.items()]


def _without_harmless(kind: str, given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    ignored = table().ignored.get(kind, ())
    ours = {}
    for name, value in given.items():
        if name in ignored and name not in known:
            continue
        entry = None if name in known else table().entries[kind].get(name)
        if entry is None:
            ours[name] = value
        elif not entry.asks_for_nothing(value):
            raise UnsupportedParameter(entry.feature.refusal(_said(name, value)))
    return ours


def _value_as_ours(name: str, value: Any) -> Any:
    plain = _plain(value)
    if not isinstance(plain, (str, int)):
        return value
    if (feature := table().refused_values.get(name, {}).get(str(plain))) is not None:
        raise UnsupportedArgument(feature.refusal(_said(name, value)))
    translations = table().values.get(name, {})
    return (translations[str(plain)] or None) if str(plain) in translations else plain


def _log(message: str) -> None:
    import logging

    logging.getLogger("penstock.config").info(message)


def _plain(value: Any) -> Any:
    """Value in plain types: members of enums and torch's dtypes by name."""
    if isinstance(value, enum.Enum):
        return value.name
    # Without an import of torch: a caller that has a dtype has imported it.
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _said(name: str, value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{name}={text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '…'}"
