"""Linear layers that take their quantised form as soon as their weight is complete, so that a model never needs the
memory of its float weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.layers.linear import LinearLayer, LinearMethod, choose_linear_method
from penstock.layers.quantization.method import MethodChoice
from penstock.layers.weights import Part, WeightSlot


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint, and what of it is in a layer's weight; None: all."""

    name: str
    part: Part | None = None


# From a layer, and the checkpoint's tensors that make up its weight, row by row, to how it multiplies;
# None for one whose weight stays in floating point.
LayerMethod = Callable[[LinearLayer, list[Piece]], LinearMethod | None]


class Rounding(Protocol):
    """What makes integers of a model's weights while they are loaded. description: for people."""

    description: str

    def weights(
        self, tensors: Iterable[tuple[str, Tensor]], has_place: Callable[[str], bool]
    ) -> Iterable[tuple[str, Tensor]]:
        """The tensors of a checkpoint as those of a float one. has_place: whether the model has one of that name."""

    def method(self, layer: LinearLayer, pieces: list[Piece]) -> LinearMethod | None:
        """How a layer multiplies, whose weight is these of the tensors, row by row; None for float weights."""

    def choose(self, layer: LinearLayer) -> LinearMethod:
        """The same for a model whose layers are not assembled."""


class OptionRounding:
    """For float checkpoints: every layer is rounded as an option says."""

    def __init__(self, choose: MethodChoice, description: str) -> None:
        self.choose = choose
        self.description = description

    def weights(
        self, tensors: Iterable[tuple[str, Tensor]], has_place: Callable[[str], bool]
    ) -> Iterable[tuple[str, Tensor]]:
        return tensors

    def method(self, layer: LinearLayer, pieces: list[Piece]) -> LinearMethod:
        return self.choose(layer)


def linear_weights(model: nn.Module) -> dict[int, LinearLayer]:
    """By the id of its weight, each layer that keeps its weight alone, or together with embeddings that can read it."""
    return {
        id(module.weight): module
        for module in model.modules()
        if isinstance(module, LinearLayer) and not module.shares_weight
    }


def assemble(
    slots: Mapping[str, WeightSlot], layers: Mapping[int, LinearLayer], dtype: torch.dtype, choose: LayerMethod
) -> dict[str, WeightSlot]:
    """Slots that build the weights of these layers, which have none yet, and hand each to its method when it is there.

    dtype: what weights that stay in floating point are kept in.
    """
    assemblies = {weight: _Assembly(layer, dtype, choose) for weight, layer in layers.items()}
    return {name: _assembled(name, slot, assemblies) for name, slot in slots.items()}


@dataclass(slots=True)
class _Assembly:
    """One layer's weight while its pieces come, which are kept by their first row."""

    layer: LinearLayer
    dtype: torch.dtype
    choose: LayerMethod
    pieces: dict[int, Piece] = field(default_factory=dict)
    missing: int = 0
    weight_OI: Tensor | None = None

    def add(self, name: str, slot: WeightSlot) -> None:
        self.pieces[int(slot.target.storage_offset())] = Piece(name, slot.part)
        self.missing += slot.target.numel()

    def take(self, target: Tensor, tensor: Tensor) -> None:
        if self.weight_OI is None:
            self.weight_OI = torch.empty(self.layer.weight.shape, dtype=torch.float32, device=tensor.device)
        self.weight_OI.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(tensor)
        self.missing -= target.numel()
        if self.missing == 0:
            self._finish(self.weight_OI)
            self.weight_OI = None

    def _finish(self, weight_OI: Tensor) -> None:
        method = self.choose(self.layer, [self.pieces[row] for row in sorted(self.pieces)])
        if method is None:
            weight_OI = weight_OI.to(self.dtype)
            method = choose_linear_method(weight_OI, self.layer.compute_dtype)
        self.layer.take_weight(weight_OI)
        self.layer.method = method
        method.process_weights_after_loading(self.layer)


@dataclass(frozen=True, slots=True)
class _AssembledSlot(WeightSlot):
    """target: on the meta device; it says which part of the layer's weight this is."""

    assembly: _Assembly = field(kw_only=True)

    def fill(self, part: Tensor) -> None:
        self.assembly.take(self.target, part)


def _assembled(name: str, slot: WeightSlot, assemblies: Mapping[int, _Assembly]) -> WeightSlot:
    whole = slot.target if slot.target._base is None else slot.target._base
    assembly = assemblies.get(id(whole))
    if assembly is None:
        return slot
    assembly.add(name, slot)
    return _AssembledSlot(slot.shape, slot.target, slot.part, assembly=assembly)
