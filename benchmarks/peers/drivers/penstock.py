"""Penstock, through `LLM.generate`."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.drivers.protocol import serve
from penstock import LLM, SamplingParams


def touch_kv_cache(worker: Any) -> None:
    """Write to all memory of a worker's KV cache."""
    worker.runner.kv_cache.touch()


class Penstock:
    def __init__(self, model: str, threads: int, kv_tokens: int, kv_bytes: int, **options: Any) -> None:
        self._llm = LLM(
            model, device="cpu", num_threads=threads, max_model_len=2048, kv_cache_memory_bytes=kv_bytes, **options
        )
        # New prompts take blocks that were never used, whose pages a virtual machine clears slowly; engines without a
        # prefix cache take the same memory again.
        self._llm.collective_rpc(touch_kv_cache)

    def generate(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in num_outputs
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, without special tokens around them."""
        tokenizer = self._llm.get_tokenizer()
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def logprobs(self, windows: list[list[int]]) -> list[float]:
        """Log-probability of every token but the first of each window."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate(windows, params, use_tqdm=False)
        return [
            logprobs[token].logprob
            for window, output in zip(windows, outputs, strict=True)
            for token, logprobs in zip(window[1:], output.prompt_logprobs[1:], strict=True)
        ]


if __name__ == "__main__":
    serve(Penstock, ["penstock", "torch"])
