"""Checks of weights that replace those of a running model."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.checkpoints.resolve import resolve_model_folder
from penstock.config import ModelConfig
from penstock.config.model import NO_QUANTIZATION
from penstock.errors import ModelError
from penstock.loader.loader import build_model
from penstock.models.attention_layers import attention_layers
from penstock.parallel import ParallelState

_DIFFERENCES_SHOWN = 4
# Fields of config.json that no model reads.
_NOTES = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "model_id"})


def config_of_replacement(current: ModelConfig, weights_path: str | None) -> ModelConfig:
    """Return the model configuration of a reload; None reads the same folder again.

    A folder without config.json holds weights for the present configuration. The tokenizer and all options stay.
    """
    if weights_path is None:
        weights_path = current.model
    folder = resolve_model_folder(weights_path, mmproj=current.mmproj)
    moved = replace(current, model=weights_path, folder=folder)
    if not os.path.lexists(folder / "config.json"):
        return moved
    loaded = ModelConfig.load(
        weights_path,
        hf_config_path=current.hf_config_path,
        hf_overrides=current.hf_overrides,
        mmproj=current.mmproj,
    )
    return replace(moved, hf_config=loaded.hf_config, hf_generation_config=loaded.hf_generation_config)


def check_replacement(
    current: ModelConfig, new: ModelConfig, parallel: ParallelState, max_model_len: int | None
) -> None:
    """Check whether weights of a configuration can serve in place of the current ones.

    max_model_len: context length of the engine, if it runs. Raises ModelError for another architecture or shape.
    """
    _check_same_shape(current, new, parallel)
    if max_model_len is not None and new.longest_context < max_model_len:
        raise ModelError(
            f"{new.model} was made for {new.longest_context} positions ({new.context_source}), but this engine "
            f"serves {max_model_len}. Create a new engine for it."
        )


def constants_of(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json that a model is built by, without notes."""
    return {name: value for name, value in config.hf_config.items() if name not in _NOTES}


def is_quantized(config: ModelConfig) -> bool:
    """Whether an option quantises the weights."""
    return config.quantization not in (None, NO_QUANTIZATION)


def _check_same_shape(current: ModelConfig, new: ModelConfig, parallel: ParallelState) -> None:
    """Raise ModelError unless both configurations have the same architecture, parameters and attention."""
    if new.architecture != current.architecture:
        raise ModelError(
            f"{new.model} has the architecture {new.architecture}, but this engine runs {current.architecture}. "
            "Create a new engine for it."
        )
    before, after = (_shape_of(build_model(config, parallel)) for config in (current, new))
    differences = [
        f"{name} (was {before.get(name, 'not there')}, would be {after.get(name, 'not there')})"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    if new.vocab_size != current.vocab_size:
        differences.insert(0, f"vocab_size (was {current.vocab_size}, would be {new.vocab_size})")
    if differences:
        shown = "; ".join(differences[:_DIFFERENCES_SHOWN])
        raise ModelError(
            f"The config.json of {new.model} describes a model of another shape than the one that serves: {shown} "
            f"({len(differences)} differences in all). Create a new engine for it."
        )


def _shape_of(model: nn.Module) -> dict[str, str]:
    shape = {name: str(list(parameter.shape)) for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, layer in attention_layers(model).items():
        shape[name] = (
            f"{layer.num_heads} heads, {layer.num_kv_heads} KV heads of {layer.head_size}, "
            f"window {layer.sliding_window}, chunks of {layer.chunk_size}"
        )
    return shape
