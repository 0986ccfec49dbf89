"""Transformers' continuous batching: paged attention and a scheduler of its own, one length per request."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.peers.drivers.protocol import serve


class ContinuousBatching:
    def __init__(self, model: str, threads: int, kv_tokens: int, kv_bytes: int, dtype: str = "auto") -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
        self._model.eval()
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = self._model.init_continuous_batching(generation_config=config)
        self._manager.start()

    def generate(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        ids = [
            self._manager.add_request(prompt, max_new_tokens=count)
            for prompt, count in zip(prompts, num_outputs, strict=True)
        ]
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(ids):
            result = self._manager.get_result(timeout=0.05)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"a request failed: {result.error}")
                outputs[result.request_id] = result.generated_tokens
            elif result is None and not self._manager.is_running():
                raise RuntimeError("continuous batching has stopped")
        return [outputs[request_id] for request_id in ids]


if __name__ == "__main__":
    serve(ContinuousBatching, ["transformers", "torch"])
