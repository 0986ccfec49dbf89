"""Reload of weights: a second model is loaded beside the running one, then replaces it."""

from __future__ import annotations

import os
from dataclasses import replace

from torch import nn

from penstock.checkpoints.resolve import resolve_model_folder
from penstock.config import LoadConfig, ModelConfig
from penstock.device import Device, DtypeChoice
from penstock.errors import ModelError, OutOfMemory
from penstock.loader.loader import build_model
from penstock.models.attention_layers import attention_layers
from penstock.models.causal_lm import CausalLM
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.worker.calibration import load_for_device

_DIFFERENCES_SHOWN = 4


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


def load_replacement(
    current: ModelConfig,
    new: ModelConfig,
    load_config: LoadConfig,
    parallel: ParallelState,
    device: Device,
    dtype: DtypeChoice,
    *,
    max_model_len: int | None,
    size_bytes: int,
    keeps_inputs: bool = False,
) -> CausalLM:
    """Load a model to replace the current one.

    Needs `size_bytes` (the model's memory once more) until the old one is dropped. max_model_len: context length of the
    engine, if it runs. Raises ModelError for another architecture or shape, OutOfMemory without enough memory,
    CheckpointError for weights that are damaged or do not fit.
    """
    _check_same_shape(current, new, parallel)
    if max_model_len is not None and new.longest_context < max_model_len:
        raise ModelError(
            f"{new.model} was made for {new.longest_context} positions ({new.context_source}), but this engine "
            f"serves {max_model_len}. Create a new engine for it."
        )
    if new.calibration_file is not None:
        # Calibration needs the unquantised model first.
        num_values = sum(parameter.numel() for parameter in build_model(new, parallel).parameters())
        size_bytes += num_values * dtype.weights_torch_dtype.itemsize
    free = device.memory_snapshot().free
    if size_bytes > free:
        raise OutOfMemory(
            f"Reloading keeps the old weights until the new ones are complete, which takes {format_bytes(size_bytes)} "
            f"more, but only {format_bytes(free)} are free. Create a new engine instead, or give the KV cache less."
        )
    return load_for_device(new, load_config, parallel, device, dtype, keeps_inputs=keeps_inputs)


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
