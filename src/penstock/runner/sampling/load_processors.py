"""Loading of logits processors: built-in, installed as entry points, or named by the `logits_processors` option."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from penstock.config.sampling import LOGITS_PROCESSORS_GROUP
from penstock.errors import ConfigError
from penstock.runner.sampling.logits_processor import LogitsProcessor
from penstock.runner.sampling.thinking_budget import ThinkingBudget
from penstock.system import env

GROUP = LOGITS_PROCESSORS_GROUP


def load_logits_processors(configured: Iterable[str | type]) -> list[type[LogitsProcessor]]:
    """Return the classes in the order of application; the thinking budget is last, since it forces tokens.

    configured: classes, or their qualified names ("module:Class").
    Raises ConfigError for one that cannot be loaded, is not a LogitsProcessor, or repeats a name.
    """
    found = [_checked(_load_entry_point(entry_point), entry_point.value) for entry_point in installed()]
    found += [_checked(item if isinstance(item, type) else _import(item), item) for item in configured]
    classes: list[type[LogitsProcessor]] = [*found, ThinkingBudget]
    unique = list(dict.fromkeys(classes))
    by_name: dict[str, type[LogitsProcessor]] = {}
    for processor in unique:
        other = by_name.setdefault(processor.name, processor)
        if other is not processor:
            raise ConfigError(
                f"Two logits processors have the name {processor.name!r}: {_qualified(other)} and "
                f"{_qualified(processor)}. Rename one."
            )
    return unique


def installed() -> list[EntryPoint]:
    """Entry points of installed packages, by name; filtered by PENSTOCK_PLUGINS."""
    allowed = env.allowed_plugins()
    found = [point for point in entry_points(group=GROUP) if allowed is None or point.name in allowed]
    return sorted(found, key=lambda point: point.name)


def _load_entry_point(entry_point: EntryPoint) -> object:
    try:
        return entry_point.load()
    except Exception as error:
        raise ConfigError(
            f"The logits processor {entry_point.name!r} ({entry_point.value}) cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def _import(name: str) -> object:
    module_name, colon, class_name = name.partition(":")
    try:
        if not (module_name and colon and class_name):
            raise ValueError("it is not a qualified name")
        return getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ConfigError(
            f"logits_processors has {name!r}, which cannot be loaded: {type(error).__name__}: {error}. Allowed: "
            "classes, or names such as 'my_package.my_module:MyProcessor'."
        ) from error


def _checked(found: object, origin: object) -> type[LogitsProcessor]:
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(
            f"logits_processors has {origin!r}, which is not a LogitsProcessor (penstock.runner.sampling). Derive it "
            "from that class."
        )
    name = getattr(found, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"Logits processor {_qualified(found)} has name={name!r}. Allowed: a text that is not empty.")
    return found


def _qualified(processor: type) -> str:
    return f"{processor.__module__}:{processor.__qualname__}"
