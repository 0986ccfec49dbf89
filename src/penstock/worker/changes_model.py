"""Marks of worker methods: whether recorded programs of the model still hold after a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])

CHANGES_MODEL = "_changes_model"


def changes_model(method: _Method) -> _Method:
    """Mark a method that may put another model or other weights in place, or hand the model to its caller."""
    setattr(method, CHANGES_MODEL, True)
    return method


def keeps_model(method: _Method) -> _Method:
    """Mark a method of another package's worker that leaves the model, its weights and their addresses as they are."""
    setattr(method, CHANGES_MODEL, False)
    return method
