"""Values for the buffers of a model that was built without memory, such as rotary frequencies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.models.transformers_fallback.refusal import CannotRun

# What a rotary module is told that it is, once its frequencies are never to change again.
_FIXED = "fixed"


def create_buffers(model: PreTrainedModel) -> None:
    """Give every buffer on the meta device memory on the CPU, and the value that the model's own class gives it.

    Those that checkpoints hold stay uninitialised. Raises CannotRun, naming it, for another one that gets no value.
    """
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for owner in reversed(owners):
        for name, module in owner.named_modules():
            made = _make_empty(module)
            if made:
                _initialise(owner, module)
            for buffer in made:
                value = getattr(module, buffer)
                if value.is_floating_point() and value.isnan().any():
                    raise CannotRun(f"its class gives the buffer {name}.{buffer} no value outside of a checkpoint")


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """While this lasts, all buffers are without values, as parameters on the meta device are."""
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
    """Keep rotary frequencies as they are in every step.

    Transformers changes them with the longest position of a batch where the type is "dynamic" or "longrope", so that
    one request would change another's tokens. Within the model's own context, "dynamic" never changes them.
    Raises CannotRun where max_model_len reaches beyond what the short frequencies of "longrope" are for.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            _check_longrope(rope_type, module, None, max_model_len)
            module.rope_type = _FIXED
        elif isinstance(rope_type, dict):
            for layer_type, one in rope_type.items():
                _check_longrope(one, module, layer_type, max_model_len)
            module.rope_type = dict.fromkeys(rope_type, _FIXED)


def _check_longrope(rope_type: Any, module: nn.Module, layer_type: str | None, max_model_len: int) -> None:
    if rope_type != "longrope":
        return
    config: Any = module.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    original = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
    if max_model_len > original:
        raise CannotRun(
            f"its rotary frequencies (rope_type=longrope) depend on the longest request of a step beyond {original} "
            f"positions. Start with max_model_len={original} or less"
        )


def _make_empty(module: nn.Module) -> list[str]:
    """Names of the module's buffers that had no memory and that no checkpoint holds; now full of NaN."""
    made = []
    for name, buffer in list(module.named_buffers(recurse=False)):
        if not buffer.is_meta:
            continue
        empty = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        if buffer.is_floating_point():
            empty.fill_(float("nan"))
        setattr(module, name, empty)
        if name not in module._non_persistent_buffers_set:
            continue
        made.append(name)
    return made


def _initialise(owner: PreTrainedModel, module: nn.Module) -> None:
    with torch.device("cpu"), torch.no_grad():
        owner._init_weights(module)
