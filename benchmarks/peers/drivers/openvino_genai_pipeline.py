"""OpenVINO GenAI's continuous batching pipeline, with prefix caching."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.drivers.protocol import serve

_BLOCK_SIZE = 32


class OpenVINO:
    def __init__(
        self, model: str, threads: int, kv_tokens: int, kv_bytes: int, inference_precision: str | None = None
    ) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = kv_tokens // _BLOCK_SIZE
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if inference_precision is not None:
            properties["INFERENCE_PRECISION_HINT"] = inference_precision
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [self._config(count) for count in num_outputs])
        return [list(result.m_generation_ids[0]) for result in results]

    @staticmethod
    def _config(count: int) -> openvino_genai.GenerationConfig:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = count
        config.do_sample = False
        config.ignore_eos = True
        return config


if __name__ == "__main__":
    serve(OpenVINO, ["openvino-genai", "openvino"])
