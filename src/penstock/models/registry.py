"""From an architecture's name to the class that implements it; each is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from penstock.config import ModelConfig
from penstock.errors import UnsupportedModel

if TYPE_CHECKING:
    from penstock.models.causal_lm import CausalLM
    from penstock.parallel import ParallelContext

_MODELS = {
    "LlamaForCausalLM": "penstock.models.llama",
    "MistralForCausalLM": "penstock.models.mistral",
    "Qwen2ForCausalLM": "penstock.models.qwen2",
    "Qwen3ForCausalLM": "penstock.models.qwen3",
}


def supported_architectures() -> list[str]:
    """Names that may be the first of `architectures` in a model's `config.json`."""
    return sorted(_MODELS)


def find_model_class(model_config: ModelConfig) -> Callable[[ModelConfig, ParallelContext], CausalLM]:
    """The class for the model's architecture.

    Raises UnsupportedModel when there is none, ModelError when `config.json` names no architecture.
    """
    architecture = model_config.architecture
    if architecture not in _MODELS:
        raise UnsupportedModel(
            f"{model_config.model} has the architecture {architecture!r} "
            f"(model_type={model_config.hf_config.get('model_type')!r}), which is not implemented. "
            f"Supported: {', '.join(supported_architectures())}."
        )
    model_class: Callable[[ModelConfig, ParallelContext], CausalLM] = getattr(
        import_module(_MODELS[architecture]), architecture
    )
    return model_class
