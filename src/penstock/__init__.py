"""Penstock: an inference engine for language models.

The public names load on first use, so that `import penstock` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from penstock.version import __version__

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from penstock.config import EngineConfig
    from penstock.contract import PoolingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
    from penstock.engine.arg_utils import EngineArgs
    from penstock.engine.async_engine import AsyncEngine
    from penstock.engine.beam_search import BeamSearchOutput, BeamSearchParams
    from penstock.engine.inputs.prompts import PromptDict
    from penstock.engine.inputs.streaming_input import StreamingInput
    from penstock.engine.llm_engine import LLMEngine
    from penstock.engine.output.outputs import CompletionOutput, RequestOutput
    from penstock.engine.output.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from penstock.features.lora.request import LoRARequest
    from penstock.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptDict",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamingInput",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "penstock.llm",
    "LLMEngine": "penstock.engine.llm_engine",
    "AsyncEngine": "penstock.engine.async_engine",
    "BeamSearchOutput": "penstock.engine.beam_search",
    "BeamSearchParams": "penstock.engine.beam_search",
    "ClassificationOutput": "penstock.engine.output.pooling_outputs",
    "ClassificationRequestOutput": "penstock.engine.output.pooling_outputs",
    "CompletionOutput": "penstock.engine.output.outputs",
    "EmbeddingOutput": "penstock.engine.output.pooling_outputs",
    "EmbeddingRequestOutput": "penstock.engine.output.pooling_outputs",
    "EngineArgs": "penstock.engine.arg_utils",
    "EngineConfig": "penstock.config",
    "LoRARequest": "penstock.features.lora.request",
    "PoolingOutput": "penstock.engine.output.pooling_outputs",
    "PoolingParams": "penstock.contract",
    "PoolingRequestOutput": "penstock.engine.output.pooling_outputs",
    "PromptDict": "penstock.engine.inputs.prompts",
    "RequestOutput": "penstock.engine.output.outputs",
    "RequestOutputKind": "penstock.contract",
    "SamplingParams": "penstock.contract",
    "ScoringOutput": "penstock.engine.output.pooling_outputs",
    "ScoringRequestOutput": "penstock.engine.output.pooling_outputs",
    "StreamingInput": "penstock.engine.inputs.streaming_input",
    "StructuredOutputsParams": "penstock.contract",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return _name_of_vllm(name)
    from penstock.system.env import limit_spinning

    limit_spinning()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def _name_of_vllm(name: str) -> Any:
    from penstock.config.vllm import name_as_ours

    own_name = None if name.startswith("_") else name_as_ours(name)
    if own_name is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return __getattr__(own_name)


class _OtherModules:
    """Finder of the modules that no file of the package has: those of vLLM's names (`penstock.alias_modules`)."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        from penstock.alias_modules import find_module

        return find_module(name, __all__)


if not any(getattr(finder, "__qualname__", None) == _OtherModules.__qualname__ for finder in sys.meta_path):
    sys.meta_path.append(_OtherModules)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
