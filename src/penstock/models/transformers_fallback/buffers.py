"""Initialisation of buffers, such as rotary frequencies, of a model built on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.device.limits import memory_limit
from penstock.layers.rope_scaling import warn_about_long_factors, warn_about_stretched_base
from penstock.models.transformers_fallback.interface import CannotRun
from penstock.observability.units import format_bytes

# The rope type of a rotary module whose frequencies are fixed.
_FIXED = "fixed"


def create_buffers(model: PreTrainedModel) -> None:
    """Allocate every buffer on the CPU, with the value from the model class's own initialisation.

    Buffers that checkpoints hold stay uninitialised. Raises CannotRun for another buffer without a value.
    """
    num_bytes = sum(buffer.nbytes for buffer in model.buffers() if buffer.is_meta)
    if num_bytes > memory_limit().total_bytes:
        raise CannotRun(f"its buffers take {format_bytes(num_bytes)}, more memory than this machine has")
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    # `modules` lists a submodel after the model around it; the innermost class initialises its modules best.
    for owner in reversed(owners):
        for name, module in owner.named_modules():
            empty = [buffer for buffer, value in module.named_buffers(recurse=False) if value.is_meta]
            if not empty:
                continue
            first, second = (_initialise(owner, module, empty, fill) for fill in (0, 1))
            for buffer in empty:
                if buffer in module._non_persistent_buffers_set and not torch.equal(first[buffer], second[buffer]):
                    raise CannotRun(f"its class gives the buffer {name}.{buffer} no value outside of a checkpoint")


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Create all buffers on the meta device inside the block, like parameters."""
    kept = [
        (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in kept:
        setattr(module, name, buffer.to("meta"))
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)


def fix_rotary_frequencies(model: nn.Module, max_model_len: int) -> None:
    """Fix the rotary frequencies for all steps.

    For "dynamic" and "longrope" Transformers changes them with the longest position of a batch: one request would
    change another's tokens, and cached keys would become invalid. As in native families, the longest context that the
    engine serves decides for all.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            _choose_frequencies(rope_type, module, None, max_model_len)
            module.rope_type = _FIXED
        elif isinstance(rope_type, dict):
            for layer_type, one in rope_type.items():
                _choose_frequencies(one, module, layer_type, max_model_len)
            module.rope_type = dict.fromkeys(rope_type, _FIXED)


def _choose_frequencies(rope_type: Any, module: nn.Module, layer_type: str | None, max_model_len: int) -> None:
    """Set the module's frequencies for long contexts, if such are served; it was built with those for short ones."""
    config: Any = module.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if rope_type == "longrope":
        original = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
        warn = warn_about_long_factors
    elif rope_type == "dynamic":
        original, warn = config.max_position_embeddings, warn_about_stretched_base
    else:
        return
    if max_model_len <= original:
        return
    warn(max_model_len, original)
    with torch.device("cpu"):
        frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=max_model_len, layer_type=layer_type)
    setattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq", frequencies)


def _initialise(owner: PreTrainedModel, module: nn.Module, buffers: list[str], fill: int) -> dict[str, Tensor]:
    """Values from the initialisation in the class of `owner` for these buffers, filled with `fill` before."""
    for name in buffers:
        value: Tensor = getattr(module, name)
        setattr(module, name, torch.full(value.shape, fill, dtype=value.dtype, device="cpu"))
    with torch.device("cpu"), torch.no_grad():
        owner._init_weights(module)
    return {name: getattr(module, name).clone() for name in buffers}
