"""Assembly of quantised linear layers: each is quantised once its weight is complete, so that the float model never
needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import UnsupportedFeature
from penstock.kernels.native import NATIVE
from penstock.layers.linear import LinearLayer, LinearMethod, choose_linear_method
from penstock.layers.quantization.method import MethodChoice
from penstock.layers.weights import Part, WeightSlot


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece of a layer's weight: a checkpoint tensor, and the part of it; None: all."""

    name: str
    part: Part | None = None


# Chooses the linear method of a layer from the checkpoint tensors of its weight; None for float weights.
LayerMethod = Callable[[LinearLayer, list[Piece]], LinearMethod | None]


def stays_float(layer: LinearLayer, pieces: list[Piece]) -> None:
    """No method: all weights are kept in floating point."""


class Rounding(Protocol):
    """Interface of quantisation at load. description: for logs. keeps_floats: layers compute with float weights."""

    description: str
    keeps_floats: bool

    def weights(
        self, tensors: Iterable[tuple[str, Tensor]], has_place: Callable[[str], bool]
    ) -> Iterable[tuple[str, Tensor]]:
        """Iterate over the checkpoint as float tensors, or int8 where `method` takes integers.

        has_place: whether the model has a tensor of that name.
        """

    def method(self, layer: LinearLayer, pieces: list[Piece]) -> LinearMethod | None:
        """Return the linear method of a weight made of these tensors; None for float weights."""

    def choose(self, layer: LinearLayer) -> LinearMethod:
        """Return the linear method of a layer that is not assembled."""


class OptionRounding:
    """Quantisation of a float checkpoint by an option."""

    keeps_floats = False

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
    """Return layers by id of their weight, if no module shares it but embeddings that can read packed weights."""
    return {
        id(module.weight): module
        for module in model.modules()
        if isinstance(module, LinearLayer) and not module.shares_weight
    }


def assemble(
    slots: Mapping[str, WeightSlot],
    layers: Mapping[int, LinearLayer],
    device: torch.device,
    dtype: torch.dtype,
    choose: LayerMethod,
    places: Places | None = None,
) -> dict[str, WeightSlot]:
    """Return slots that collect the weights of these layers on a device, and quantise each when complete.

    dtype: of weights that stay in floating point. places: where the weights belong; None leaves them in the layers.
    """
    scratch = _Scratch(device)
    assemblies = {weight: _Assembly(layer, scratch, dtype, choose, places) for weight, layer in layers.items()}
    return {name: _assembled(name, slot, assemblies) for name, slot in slots.items()}


class Places(Protocol):
    """Places of the weights of finished layers, such as a live model's."""

    def takes_pieces(self, layer: LinearLayer, pieces: Iterable[tuple[int, int]], sample: Tensor) -> bool:
        """Whether rows of a weight, each a first one and their number, can go to their place one after the other."""

    def take_piece(self, layer: LinearLayer, rows_RI: Tensor, begin: int) -> None:
        """Take rows of a weight."""

    def lend(self, layer: LinearLayer, method: LinearMethod) -> None:
        """Let a method pack the layer's weight where it belongs, if it can."""

    def take(self, layer: LinearLayer) -> None:
        """Take a finished layer's weight, and free the layer."""


class _Scratch:
    """Memory of incomplete weights, for one layer after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory without values."""
        spare = self._spare.pop((shape, dtype), None)
        return torch.empty(shape, dtype=dtype, device=self._device) if spare is None else spare

    def give_back(self, memory: Tensor) -> None:
        """Note memory that nothing uses any more."""
        self._spare[memory.shape, memory.dtype] = memory


@dataclass(slots=True)
class _Assembly:
    """Incomplete weight of one layer: pieces by their first row."""

    layer: LinearLayer
    scratch: _Scratch
    dtype: torch.dtype
    choose: LayerMethod
    places: Places | None = None
    pieces: dict[int, Piece] = field(default_factory=dict)
    missing: int = 0
    weight_OI: Tensor | None = None
    # Number of values of each piece by its first one; whether pieces go to their place one by one.
    ranges: dict[int, int] = field(default_factory=dict)
    in_pieces: bool | None = None

    def add(self, name: str, slot: WeightSlot) -> None:
        self.pieces[int(slot.target.storage_offset())] = Piece(name, slot.part)
        self.ranges[int(slot.target.storage_offset())] = slot.target.numel() if slot.target.is_contiguous() else 1
        self.missing += slot.target.numel()

    def take(self, target: Tensor, tensor: Tensor) -> None:
        # A weight that is kept as it comes needs no wider one, and none at all beside its place where it fits there.
        as_it_comes = self.choose is stays_float and tensor.dtype is self.dtype
        if self.places is not None and self.choose is stays_float and self._goes_to_its_place(target, tensor):
            return
        is_whole = target.shape == self.layer.weight.shape == tensor.shape and target.is_contiguous()
        if as_it_comes and self.places is not None and is_whole:
            self.missing = 0
            self._finish(tensor)
            return
        if self.weight_OI is None:
            dtype = torch.int8 if tensor.dtype is torch.int8 else self.dtype if as_it_comes else torch.float32
            self.weight_OI = self.scratch.take(self.layer.weight.shape, dtype)
        self.weight_OI.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(tensor)
        self.missing -= target.numel()
        if self.missing == 0:
            weight_OI, self.weight_OI = self.weight_OI, None
            self._finish(weight_OI)
            if self.places is not None:
                self.scratch.give_back(weight_OI)

    def _goes_to_its_place(self, target: Tensor, tensor: Tensor) -> bool:
        """Pack a piece where it belongs, if all pieces of the layer can be."""
        assert self.places is not None, "asked with places"
        num_inputs = self.layer.weight.shape[1]
        if self.in_pieces is None:
            rows = [(begin // num_inputs, count // num_inputs) for begin, count in self.ranges.items()]
            are_rows = all(begin % num_inputs == count % num_inputs == 0 for begin, count in self.ranges.items())
            sample = tensor[:1].reshape(1, -1).to(self.dtype)
            self.in_pieces = are_rows and tensor.shape == target.shape and target.is_contiguous()
            self.in_pieces = self.in_pieces and self.places.takes_pieces(self.layer, rows, sample)
        if self.in_pieces:
            # A checkpoint's tensor may have more dimensions, as a convolution's weight.
            rows_RI = tensor.expand(target.shape).reshape(-1, num_inputs).to(self.dtype)
            self.places.take_piece(self.layer, rows_RI, int(target.storage_offset()) // num_inputs)
        return self.in_pieces

    def _finish(self, weight_OI: Tensor) -> None:
        pieces = [self.pieces[row] for row in sorted(self.pieces)]
        method = None if self.layer.keeps_precision else self.choose(self.layer, pieces)
        if method is None and not weight_OI.is_floating_point():
            raise UnsupportedFeature(
                f"{pieces[0].name} is stored in MXFP4, but this layer needs float weights. Dequantise the checkpoint: "
                "quantization='none'."
            )
        self.layer.take_weight(weight_OI.to(self.dtype) if method is None else weight_OI)
        if method is None:
            arithmetic = "float32" if self.layer.keeps_precision else self.layer.cpu_arithmetic
            method = self.layer.own_method(NATIVE) or choose_linear_method(
                self.layer.weight, self.layer.compute_dtype, arithmetic
            )
        self.layer.method = method
        if self.places is not None:
            self.places.lend(self.layer, method)
        method.process_weights_after_loading(self.layer)
        if self.places is not None:
            self.places.take(self.layer)


@dataclass(frozen=True, slots=True)
class _AssembledSlot(WeightSlot):
    """Slot of one piece. target: meta tensor of its part of the layer's weight."""

    takes_integers: ClassVar[bool] = True
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
