"""Model of a running engine, as programs that replace its weights see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class LiveModel:
    """Model whose weights a trainer replaces, tensor by tensor.

    load: takes (name, tensor) pairs.
    """

    def __init__(self, load: Callable[[list[tuple[str, Any]]], object]) -> None:
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Replace weights by tensors of the checkpoint's names and shapes, in any order and over any number of calls.

        The new weights are complete when all of the model's tensors have arrived. Returns the names of these.
        """
        given = list(weights)
        self._load(given)
        return {name for name, _ in given}
