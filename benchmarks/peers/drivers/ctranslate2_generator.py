"""CTranslate2's Generator. It knows one length per call, so requests of similar output length go together."""

from __future__ import annotations

import json
from pathlib import Path

import ctranslate2

from benchmarks.peers.drivers.protocol import serve


class CTranslate2:
    """group_size: requests that one call takes, sorted by how much they are to generate."""

    def __init__(
        self, model: str, threads: int, kv_tokens: int, kv_bytes: int, compute_type: str, group_size: int
    ) -> None:
        self._generator = ctranslate2.Generator(
            model, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
        )
        self._group_size = group_size
        self._words: list[str] = json.loads((Path(model) / "vocabulary.json").read_text())

    def generate(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=num_outputs.__getitem__, reverse=True)
        outputs: dict[int, list[int]] = {}
        for begin in range(0, len(order), self._group_size):
            group = order[begin : begin + self._group_size]
            outputs |= zip(
                group, self._generate([prompts[index] for index in group], num_outputs[group[0]]), strict=True
            )
        return [outputs[index][:count] for index, count in enumerate(num_outputs)]

    def _generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        results = self._generator.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]


if __name__ == "__main__":
    serve(CTranslate2, ["ctranslate2"])
