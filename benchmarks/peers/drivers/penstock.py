"""Penstock, through `LLM.generate`."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.drivers.protocol import serve
from penstock import LLM, SamplingParams


class Penstock:
    def __init__(self, model: str, threads: int, kv_tokens: int, kv_bytes: int, **options: Any) -> None:
        self._llm = LLM(
            model, device="cpu", num_threads=threads, max_model_len=2048, kv_cache_memory_bytes=kv_bytes, **options
        )

    def generate(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in num_outputs
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    serve(Penstock, ["penstock", "torch"])
