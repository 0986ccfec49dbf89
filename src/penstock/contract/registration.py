"""Registration of plugins' factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigError


def register_once(registered: list[Callable[..., Any]], factory: Callable[..., Any]) -> None:
    """Add a factory to a list, or replace the one of the same module and name: plugins are called several times.

    Raises ConfigError for a lambda, a nested function or another object without a name in its module.
    """
    name = getattr(factory, "__qualname__", "<object>")
    if "<" in name:
        raise ConfigError(
            f"{factory} cannot be registered: a plugin is called several times, and would add another one each time. "
            "Register a function or a class of a module."
        )
    names = [(known.__module__, known.__qualname__) for known in registered]
    if (factory.__module__, name) in names:
        registered[names.index((factory.__module__, name))] = factory
    else:
        registered.append(factory)
