"""Embeddings by OpenVINO GenAI's text embedding pipeline, which pads a call's texts to the longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino
import openvino_genai

from benchmarks.peers.drivers.embedding import EmbeddingDriver, by_length
from benchmarks.peers.drivers.protocol import serve


class OpenVINO:
    def __init__(self, model: str, threads: int, batch_size: int, inference_precision: str | None = None) -> None:
        config = openvino_genai.TextEmbeddingPipeline.Config()
        config.pooling_type = openvino_genai.TextEmbeddingPipeline.PoolingType.MEAN
        config.normalize = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if inference_precision is not None:
            properties["INFERENCE_PRECISION_HINT"] = inference_precision
        self._pipeline = openvino_genai.TextEmbeddingPipeline(model, "CPU", config, **properties)
        self._batch_size = batch_size
        core = openvino.Core()
        core.set_property("CPU", properties)
        precision = core.get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
        self.precision = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}.get(precision, precision)

    def embed(self, texts: Sequence[str]) -> list[Any]:
        return by_length(texts, self._batch_size, self._pipeline.embed_documents)


def load(
    model: str, threads: int, batch_size: int, inference_precision: str | None = None, **_: Any
) -> EmbeddingDriver:
    return EmbeddingDriver(OpenVINO(model, threads, batch_size, inference_precision))


if __name__ == "__main__":
    serve(load, ["openvino-genai", "openvino"])
