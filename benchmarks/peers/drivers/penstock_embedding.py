"""Embeddings by Penstock, through `LLM.embed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.drivers.embedding import EmbeddingDriver
from benchmarks.peers.drivers.protocol import serve
from penstock import LLM


class Penstock:
    def __init__(self, model: str, threads: int, **options: Any) -> None:
        self._llm = LLM(model, device="cpu", num_threads=threads, **options)
        model = self._llm.config.model
        weights = model.checkpoint_dtype if model.dtype == "auto" else model.dtype
        narrow = weights if weights == "float32" else f"float32, {weights} weights"
        self.precision = str(options.get("quantization") or narrow)

    def embed(self, texts: Sequence[str]) -> list[Any]:
        return [output.outputs.embedding for output in self._llm.embed(list(texts), use_tqdm=False)]


def load(model: str, threads: int, **options: Any) -> EmbeddingDriver:
    for name in ("kv_tokens", "kv_bytes", "batch_size"):
        del options[name]
    return EmbeddingDriver(Penstock(model, threads, **options))


if __name__ == "__main__":
    serve(load, ["penstock", "torch"])
