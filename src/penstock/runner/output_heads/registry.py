"""Output heads by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from penstock.config.model import GENERATE
from penstock.config.pooling import POOL
from penstock.errors import ConfigError
from penstock.runner.output_heads.base import HeadParts, OutputHead
from penstock.runner.output_heads.earlier_stage import EarlierStage
from penstock.runner.output_heads.generation import Generation
from penstock.runner.output_heads.text_pooling import TextPooling

HeadFactory: TypeAlias = Callable[[HeadParts], OutputHead]

_factories: dict[str, HeadFactory] = {GENERATE: Generation, POOL: TextPooling}


def register_output_head(name: str, factory: HeadFactory) -> None:
    """Register an output head by name. A plugin may call it again; `factory` is a function or class of a module.

    Raises ConfigError for a name that another head has.
    """
    known = _factories.setdefault(name, factory)
    if (known.__module__, known.__qualname__) != (factory.__module__, factory.__qualname__):
        raise ConfigError(f"Two output heads are named {name!r}: {known} and {factory}.")
    _factories[name] = factory


def create_output_head(name: str, parts: HeadParts) -> OutputHead:
    """Create the output head of this name; on stages before the last, `EarlierStage`.

    Raises ConfigError for an unknown name.
    """
    if name not in _factories:
        known = ", ".join(sorted(_factories))
        raise ConfigError(f"output_head={name!r} is not registered. Registered: {known}. Plugins add others.")
    return _factories[name](parts) if parts.stage.is_last else EarlierStage(parts)
