"""Scales of an FP8 KV cache in a checkpoint: one for the keys and one for the values of each attention layer.

Their names, as vLLM reads them too: `k_scale` and `v_scale`, or `kv_scale` for both, of the attention itself or of its
`attn`, `k_proj`, `v_proj` or `qkv_proj`; `k_proj.output_scale` and `v_proj.output_scale`. Scales of queries and of
softmax weights are for products in FP8, which attention does not compute here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor, nn

from penstock.errors import CheckpointError, UnsupportedFeature
from penstock.kernels.paged_attention import CacheScales
from penstock.layers.attention import Attention
from penstock.models.attention_layers import attention_layers, modules_of_attention
from penstock.models.causal_lm import CausalLM

_KEY, _VALUE = "k_scale", "v_scale"
# Scales that a tensor gives, by the last part of its name.
_KINDS: Mapping[str, Sequence[str]] = {
    _KEY: (_KEY,),
    _VALUE: (_VALUE,),
    "kv_scale": (_KEY, _VALUE),
    "q_scale": (),
    "prob_scale": (),
}
# The same of `output_scale`, by the module that it belongs to.
_KINDS_OF_OUTPUT: Mapping[str, Sequence[str]] = {"k_proj": (_KEY,), "v_proj": (_VALUE,)}
_PARTS = ("attn", "k_proj", "v_proj", "qkv_proj")
# Projections by whose names attention is found in a checkpoint.
_PROJECTIONS = ("k_proj", "qkv_proj", "kv_a_proj_with_mqa", "c_attn")


class CheckpointScales:
    """Reads the scales among a checkpoint's tensors. is_state: names are those of `scales_of_state`."""

    def __init__(self, model: CausalLM, *, is_state: bool) -> None:
        self._model, self._is_state = model, is_state
        self._found: dict[str, dict[str, float]] = {}

    @cached_property
    def _attention(self) -> dict[str, Attention | None]:
        return _names_in_state(self._model) if self._is_state else _names_in_checkpoint(self._model)

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the other tensors. Raises what `scale_of` raises.

        Scales of other pipeline stages are dropped, and those of no attention left to the model, which refuses them.
        """
        for name, tensor in tensors:
            attention, kinds = self._place(name)
            if attention is None:
                yield name, tensor
            elif kinds and self._attention[attention] is not None and not tensor.is_meta:
                self._found.setdefault(attention, {}).update(dict.fromkeys(kinds, scale_of(name, tensor)))

    def apply(self) -> None:
        """Set the scales of the layers. Raises CheckpointError for a layer with one of the two."""
        for name, found in self._found.items():
            module = self._attention[name]
            assert module is not None, f"{name} is on another pipeline stage"
            if module.layer.latent_size is not None and _KEY in found:
                found[_VALUE] = found[_KEY]  # a value is a part of its key
            missing = {_KEY, _VALUE} - found.keys()
            if missing:
                raise CheckpointError(
                    f"{name} has a scale of its KV cache, but no {missing.pop()}. Download the checkpoint again."
                )
            module.layer = replace(module.layer, cache_scales=CacheScales(found[_KEY], found[_VALUE]))

    def _place(self, name: str) -> tuple[str | None, Sequence[str]]:
        """Attention that a tensor belongs to, and its scales there; None for another tensor."""
        module, _, kind = self._model.checkpoint_name(name).rpartition(".")
        parent, _, part = module.rpartition(".")
        kinds = _KINDS_OF_OUTPUT.get(part) if kind == "output_scale" else _KINDS.get(kind)
        if kinds is None:
            return None, ()
        names = (module, parent) if part in _PARTS else (module,)
        return next((one for one in names if one in self._attention), None), kinds


def scale_of(name: str, tensor: Tensor) -> float:
    """Return the scale. Raises UnsupportedFeature for several in a tensor, CheckpointError unless it is positive."""
    if tensor.numel() != 1:
        raise UnsupportedFeature(
            f"{name} has {tensor.numel()} scales of an FP8 KV cache, {list(tensor.shape)}. Supported: one per layer."
        )
    scale = float(tensor)
    if not math.isfinite(scale) or scale <= 0:
        raise CheckpointError(f"{name} is {scale}. The scale of a KV cache must be a positive number.")
    return scale


def scales_of_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the scales by the names of a sharded state."""
    scales = {name: layer.cache_scales for name, layer in attention_layers(model).items()}
    return {
        f"{name}.{kind}": Tensor([scale])
        for name, pair in scales.items()
        if pair is not None
        for kind, scale in zip((_KEY, _VALUE), pair, strict=True)
    }


def names_of_scales(model: CausalLM) -> list[str]:
    """Return the names that `scales_of_state` may give scales of this model."""
    return [f"{name}.{kind}" for name in attention_layers(model) for kind in (_KEY, _VALUE)]


def _names_in_state(model: CausalLM) -> dict[str, Attention | None]:
    """Attention modules by their layers' names, without the last part."""
    modules = modules_of_attention(model).values()
    return {module.layer.name.removesuffix(".attn"): module for module in modules}


def _names_in_checkpoint(model: CausalLM) -> dict[str, Attention | None]:
    """Attention modules by their names in checkpoints; None for those of other pipeline stages."""
    modules = modules_of_attention(model)
    named = {name.rpartition("."): module for name, (module, _) in model.modules_by_name().items()}
    return {
        attention: None if module is None else modules[id(module)]
        for (attention, _, kind), module in named.items()
        if kind in _PROJECTIONS and (module is None or id(module) in modules)
    }
