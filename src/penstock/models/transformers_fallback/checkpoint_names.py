"""Checkpoint tensor names of a Transformers model, and the slot of each tensor.

Checkpoints keep the names of a family's first release. The conversion tables of Transformers map these to its own
parameter names; the weights are loaded as those of native models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from penstock.errors import CheckpointError
from penstock.layers.weights import WeightSlot
from penstock.models.transformers_fallback.interface import CannotRun
from penstock.models.weights import ROTARY_BUFFERS

# Conversions that split a tensor. Older versions of Transformers have one of them.
_SPLITTING = [[kind] for name in ("Split", "Chunk") if (kind := getattr(core_model_loading, name, None)) is not None]

# Buffers in old checkpoints, derived from the configuration.
_OLD_BUFFERS = (
    r".*\." + ROTARY_BUFFERS,
    r".*\.(attention|attn|self_attn)\.(bias|masked_bias)",
    r".*\.position_ids",
)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """An expert parameter that checkpoints hold in pieces, one of each source per expert.

    sources: names of the pieces, with `*` for the expert. Experts are stacked along the parameter's first dimension,
    and an expert's sources are concatenated along its first. shape: of the whole parameter.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]

    def slots(self, parameter: Iterable[Tensor]) -> dict[str, WeightSlot]:
        """Slots of the pieces. parameter: the whole parameter, or the tensor of each expert."""
        slots = {}
        for expert, stacked in enumerate(parameter):
            for source, part in zip(self.sources, stacked.chunk(len(self.sources)), strict=True):
                slots[source.replace("*", str(expert))] = WeightSlot(tuple(part.shape), part)
        return slots


class CheckpointNames:
    """Created from the complete Transformers model, and valid after the model is taken apart."""

    def __init__(self, model: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model)}
        self._renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        self._fused = [one for one in conversions if _is_fused(one)]
        self._shapes = shapes
        self._prefix = f"{model.base_model_prefix}."
        self._stacked = _find_stacked(shapes, [one for one in conversions if isinstance(one, WeightConverter)])
        self._ignorable = (*_OLD_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ()), *_derived(model))

    @property
    def ignorable(self) -> tuple[str, ...]:
        """Regular expressions for checkpoint names without a slot."""
        return tuple(f".*(?:{pattern}).*" for pattern in self._ignorable)

    def slots(self, tensors: Iterable[tuple[str, Tensor | Sequence[Tensor]]]) -> dict[str, WeightSlot]:
        """Return the slots of the model's parameters and persistent buffers, given by their Transformers names.

        Parameters of experts may be given as a tensor of each.
        """
        slots: dict[str, WeightSlot] = {}
        for name, tensor in tensors:
            if not isinstance(tensor, Tensor) and name not in self._stacked:
                # Its checkpoints hold it as it is, and its pieces have names of their own.
                shape = (len(tensor), *tensor[0].shape)
                self._stacked[name] = StackedExperts((f"{name}.*",), shape)
            if name in self._stacked:
                slots.update(self._stacked[name].slots(tensor))
            else:
                assert isinstance(tensor, Tensor)
                slots[name] = WeightSlot(tuple(tensor.shape), tensor)
        return slots

    def renamed(
        self, weights: Iterable[tuple[str, Tensor]], is_slot: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under the names of their slots, if they have one; stacked experts in pieces."""
        for name, tensor in weights:
            slot_name = self.slot_name(name, lambda candidate: candidate in self._stacked or is_slot(candidate))
            stacked = self._stacked.get(slot_name)
            if stacked is None:
                yield from self._split(slot_name, tensor)
            elif tuple(tensor.shape) == stacked.shape:
                # A checkpoint may hold stacked experts as one tensor.
                yield from ((piece, slot.target) for piece, slot in stacked.slots(tensor).items())
            else:
                raise CheckpointError(
                    f"Misshapen: {name} (has {list(tensor.shape)}, needs {list(stacked.shape)}, all experts of it)."
                )

    def _split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of a tensor that several parameters are made of; any other one as it is."""
        for converter in self._fused:
            (source,), dim = map(_plain, converter.source_patterns), converter.operations[0].dim
            parts = [name.replace(source, _plain(target)) for target in converter.target_patterns]
            sizes = [self._shapes[part][dim] for part in parts if part in self._shapes]
            if source in name and len(sizes) == len(parts) and sum(sizes) == tensor.shape[dim]:
                yield from zip(parts, tensor.split(sizes, dim), strict=True)
                return
        yield name, tensor

    def slot_name(self, name: str, is_slot: Callable[[str], bool]) -> str:
        """Return the name of a checkpoint tensor's slot, or its Transformers name."""
        if is_slot(name):
            return name
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        for candidate in (name, self._prefix + name, name.removeprefix(self._prefix)):
            if is_slot(candidate):
                return candidate
        return name


def checkpoint_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers by name; shared ones once, under their first name."""
    yield from module.named_parameters()
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _derived(model: nn.Module) -> list[str]:
    """Names that checkpoints may lack: computed buffers, and further names of shared parameters."""
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    all_names |= {name for name, _ in model.named_buffers()}
    return [f"^{re.escape(name)}$" for name in sorted(all_names - {name for name, _ in checkpoint_tensors(model)})]


def _find_stacked(shapes: Mapping[str, tuple[int, ...]], converters: Iterable[Any]) -> dict[str, StackedExperts]:
    """Return the parameters that a converter builds from several tensors, by name.

    Raises CannotRun for an unknown kind of conversion.
    """
    stacked = {}
    converters = [one for one in converters if not _is_fused(one)]
    for name, shape in shapes.items():
        for converter in converters:
            target = _plain(converter.target_patterns[0])
            if not name.endswith(target):
                continue
            kinds = [type(operation) for operation in converter.operations]
            if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]) or len(converter.target_patterns) > 1:
                how = ", ".join(kind.__name__ for kind in kinds)
                raise CannotRun(f"its checkpoints hold {name} in an unknown form ({how})")
            prefix = name.removesuffix(target)
            sources = tuple(prefix + _plain(one) for one in converter.source_patterns)
            stacked[name] = StackedExperts(sources, shape)
    return stacked


def _is_fused(conversion: Any) -> bool:
    """Whether it cuts one tensor of a checkpoint, along one dimension, into several parameters."""
    kinds = [type(operation) for operation in getattr(conversion, "operations", ())]
    return kinds in _SPLITTING and len(conversion.source_patterns) == 1


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "").removeprefix("^").removesuffix("$")
