"""Embeddings by sentence-transformers, which sorts a call's texts by length and pads each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from benchmarks.peers.drivers.embedding import EmbeddingDriver
from benchmarks.peers.drivers.protocol import serve


class SentenceTransformers:
    def __init__(self, model: str, threads: int, batch_size: int, dtype: str | None = None) -> None:
        torch.set_num_threads(threads)
        options = {} if dtype is None else {"dtype": getattr(torch, dtype)}
        self._model = SentenceTransformer(model, device="cpu", model_kwargs=options)
        self._batch_size = batch_size
        self.precision = str(next(self._model.parameters()).dtype).removeprefix("torch.")

    def embed(self, texts: Sequence[str]) -> list[Any]:
        return list(self._model.encode(list(texts), batch_size=self._batch_size, show_progress_bar=False))


def load(model: str, threads: int, batch_size: int, dtype: str | None = None, **_: Any) -> EmbeddingDriver:
    return EmbeddingDriver(SentenceTransformers(model, threads, batch_size, dtype))


if __name__ == "__main__":
    serve(load, ["sentence-transformers", "transformers", "torch"])
