"""Features of tests: registered while a test runs."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from penstock.contract import feature as registry
from penstock.contract.feature import Feature
from penstock.contract.parts import register_part
from penstock.engine.core.engine_core import EngineCore

_Side = TypeVar("_Side")


def use_feature(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Let the engines of this process have a feature until the test ends."""
    feature = Feature(**fields)
    for part in feature.parts:
        register_part(part)
    monkeypatch.setitem(registry._registered, feature.name, feature)


def scheduler_side(core: EngineCore, side: type[_Side]) -> _Side:
    """Scheduler side of this type of a core's feature."""
    (found,) = (one for one in core.scheduler.features if isinstance(one, side))
    return found
