"""The engines, each in the forms that the tables compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineSpec:
    """driver: module of `drivers`. environment: None for the one that runs the benchmark, Penstock's.

    model_format: what `checkpoints.make` makes for it. options: what the driver's engine is given besides.
    bits_per_weight: bits read per weight, scales included. note: footnote of the table.
    variables: of its process's environment. is_default: as its users run it on a bfloat16 checkpoint, with the dtypes
    that the engine and its converter choose.
    """

    name: str
    title: str
    driver: str
    environment: str | None
    model_format: str
    bits_per_weight: float
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    note: str = ""
    is_default: bool = False


REFERENCE = "penstock-float32"
_SHARED = "a prefix shared by all prompts is computed once and copied to every sequence by the driver"
_PADDED = "one left-padded batch, which runs until the longest output is done"
_GROUPED = "one length per call: requests of similar output length run in groups of 8"

ENGINES = {
    engine.name: engine
    for engine in (
        EngineSpec(REFERENCE, "Penstock float32", "penstock", None, "float32", 32, {"dtype": "float32"}),
        EngineSpec("penstock-bfloat16", "Penstock bfloat16 weights", "penstock", None, "bfloat16", 16, is_default=True),
        EngineSpec("penstock-int8", "Penstock int8", "penstock", None, "bfloat16", 8, {"quantization": "int8"}),
        EngineSpec("penstock-int4", "Penstock int4", "penstock", None, "bfloat16", 4.5, {"quantization": "int4"}),
        EngineSpec(
            "penstock-torch",
            "Penstock float32, torch's products",
            "penstock",
            None,
            "float32",
            32,
            {"dtype": "float32"},
            {"PENSTOCK_CPU_PRODUCTS": "torch"},
        ),
        EngineSpec(
            "generate",
            "Transformers generate",
            "transformers_generate",
            "transformers",
            "float32",
            32,
            {"dtype": "float32"},
            note=_PADDED,
        ),
        EngineSpec(
            "generate-default",
            "Transformers generate, its default",
            "transformers_generate",
            "transformers",
            "bfloat16",
            16,
            note=_PADDED,
            is_default=True,
        ),
        EngineSpec(
            "continuous",
            "Transformers continuous batching",
            "transformers_continuous",
            "transformers",
            "float32",
            32,
            {"dtype": "float32"},
        ),
        EngineSpec(
            "continuous-default",
            "Transformers continuous batching, its default",
            "transformers_continuous",
            "transformers",
            "bfloat16",
            16,
            is_default=True,
        ),
        EngineSpec("vllm-float32", "vLLM CPU float32", "vllm_cpu", "vllm", "float32", 32, {"dtype": "float32"}),
        EngineSpec(
            "vllm-bfloat16",
            "vLLM CPU bfloat16",
            "vllm_cpu",
            "vllm",
            "bfloat16",
            16,
            {"dtype": "bfloat16"},
            note="bfloat16 is its default",
            is_default=True,
        ),
        EngineSpec(
            "openvino-float32",
            "OpenVINO GenAI float32",
            "openvino_genai_pipeline",
            "openvino",
            "openvino-float32",
            32,
            # Where the CPU has bfloat16 arithmetic, OpenVINO else takes that.
            {"inference_precision": "f32"},
        ),
        EngineSpec(
            "openvino-bfloat16",
            "OpenVINO GenAI bfloat16",
            "openvino_genai_pipeline",
            "openvino",
            "openvino-float32",
            16,
            {"inference_precision": "bf16"},
            note="computes in bfloat16, as it does by default where the CPU can",
        ),
        EngineSpec(
            "openvino-default",
            "OpenVINO GenAI, its default",
            "openvino_genai_pipeline",
            "openvino",
            "openvino-default",
            16,
            note="the dtype of weights and arithmetic that its converter and its runtime choose",
            is_default=True,
        ),
        EngineSpec("openvino-int8", "OpenVINO GenAI int8", "openvino_genai_pipeline", "openvino", "openvino-int8", 8),
        EngineSpec("llama.cpp-f32", "llama.cpp f32", "llama_cpp_batches", "llama-cpp", "gguf-f32", 32, note=_SHARED),
        EngineSpec(
            "llama.cpp-bf16",
            "llama.cpp bf16",
            "llama_cpp_batches",
            "llama-cpp",
            "gguf-bf16",
            16,
            note=f"what its converter makes of a bfloat16 checkpoint; {_SHARED}",
            is_default=True,
        ),
        EngineSpec(
            "llama.cpp-q8_0", "llama.cpp q8_0", "llama_cpp_batches", "llama-cpp", "gguf-q8_0", 8.5, note=_SHARED
        ),
        EngineSpec(
            "ctranslate2-float32",
            "CTranslate2 float32",
            "ctranslate2_generator",
            "ctranslate2",
            "ctranslate2-float32",
            32,
            {"compute_type": "float32", "group_size": 8},
            note=_GROUPED,
        ),
        EngineSpec(
            "ctranslate2-default",
            "CTranslate2, its default",
            "ctranslate2_generator",
            "ctranslate2",
            "ctranslate2-default",
            32,
            {"compute_type": "default", "group_size": 8},
            note=_GROUPED,
            is_default=True,
        ),
        EngineSpec(
            "ctranslate2-int8",
            "CTranslate2 int8",
            "ctranslate2_generator",
            "ctranslate2",
            "ctranslate2-int8",
            8,
            {"compute_type": "int8", "group_size": 8},
            note=_GROUPED,
        ),
    )
}
