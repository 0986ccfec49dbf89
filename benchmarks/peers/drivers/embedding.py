"""Driver of an engine that embeds, with the method that is timed, and batches of texts of similar length.

Runs in every engine's own environment, so it needs nothing but Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class EmbeddingEngine(Protocol):
    """An engine with a model loaded. precision: dtype that it computes in, as it says. embed: unit vectors."""

    precision: str

    def embed(self, texts: Sequence[str]) -> list[Any]: ...


class EmbeddingDriver:
    """Driver whose methods `benchmarks.embeddings` calls."""

    def __init__(self, engine: EmbeddingEngine) -> None:
        self._engine = engine

    def precision(self) -> str:
        return self._engine.precision

    def embed(self, texts: list[str]) -> dict[str, Any]:
        """Seconds, and a list of floats per text."""
        begin = time.perf_counter()
        vectors = self._engine.embed(texts)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "vectors": [[float(value) for value in vector] for vector in vectors]}


def by_length(texts: Sequence[str], batch_size: int, embed: Callable[[list[str]], list[Any]]) -> list[Any]:
    """Embed in batches of texts of similar length, for an engine that pads a batch to its longest text."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    vectors: list[Any] = [None] * len(texts)
    for begin in range(0, len(order), batch_size):
        numbers = order[begin : begin + batch_size]
        for number, vector in zip(numbers, embed([texts[number] for number in numbers]), strict=True):
            vectors[number] = vector
    return vectors
