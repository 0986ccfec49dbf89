"""Transformers' `generate`: one left-padded batch, which runs until the longest output is done."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.drivers.protocol import serve


class Generate:
    def __init__(self, model: str, threads: int, kv_tokens: int, kv_bytes: int, dtype: str = "auto") -> None:
        torch.set_num_threads(threads)
        # torch's attention has no sinks.
        config = json.loads((Path(model) / "config.json").read_text())
        attention = "eager" if config["model_type"] == "gpt_oss" else "sdpa"
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
        self._model.eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            rows = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=max(num_outputs), do_sample=False, pad_token_id=0
            )
        outputs = rows[:, longest:].tolist()
        return [row[:count] for row, count in zip(outputs, num_outputs, strict=True)]


if __name__ == "__main__":
    serve(Generate, ["transformers", "torch"])
