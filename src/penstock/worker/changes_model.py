"""Marks of worker methods that invalidate recorded programs of the model, or do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])

CHANGES_MODEL = "_changes_model"


def changes_model(method: _Method) -> _Method:
    """Mark a method that may change the model or its weights, or returns the model."""
    setattr(method, CHANGES_MODEL, True)
    return method


def keeps_model(method: _Method) -> _Method:
    """Mark a method of another package's worker that changes neither model nor weights, nor their addresses."""
    setattr(method, CHANGES_MODEL, False)
    return method
