"""The mark of worker methods after which recorded programs of the model no longer hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])

CHANGES_MODEL = "_changes_model"


def changes_model(method: _Method) -> _Method:
    """Mark a method that may put another model or other weights in place, or hand the model to its caller."""
    setattr(method, CHANGES_MODEL, True)
    return method
