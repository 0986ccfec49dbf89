"""Assembly of quantised linear layers: each is quantised once its weight is complete, so that the float model never
needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError, UnsupportedFeature
from penstock.kernels.native import NATIVE
from penstock.layers.linear import LinearLayer, LinearMethod, choose_linear_method
from penstock.layers.quantization.method import MethodChoice
from penstock.layers.weights import Part, WeightSlot

_NARROW = (torch.bfloat16, torch.float16)
# Dtypes of weights that are quantised as they come.
_FLOATS = (torch.float32, *_NARROW)


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
    *,
    by_layer: bool = False,
) -> dict[str, WeightSlot]:
    """Return slots that collect the weights of these layers on a device, and quantise each when complete.

    dtype: of weights that stay in floating point. places: where the weights belong; None leaves them in the layers.
    by_layer: `choose` needs no tensors, and its methods copy the weight.
    """
    scratch = _Scratch(device)
    assemblies = {
        weight: _Assembly(layer, scratch, dtype, choose, by_layer, places) for weight, layer in layers.items()
    }
    return {name: _assembled(name, slot, assemblies) for name, slot in slots.items()}


class Places(Protocol):
    """Places of the weights of finished layers, such as a live model's."""

    def takes_pieces(
        self, layer: LinearLayer, method: LinearMethod, pieces: Iterable[tuple[int, int]], sample_RI: Tensor
    ) -> bool:
        """Whether rows of a weight, each a first one and their number, can go to their place one after the other."""

    def take_piece(self, layer: LinearLayer, rows_RI: Tensor, begin: int) -> bool:
        """Take rows of a weight. Returns whether their values fit its form."""

    def lend(self, layer: LinearLayer, method: LinearMethod) -> None:
        """Let a method pack the layer's weight where it belongs, if it can."""

    def take(self, layer: LinearLayer) -> None:
        """Take a finished layer's weight, and free the layer."""


class _Scratch:
    """Memory of incomplete weights, for one layer after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spare: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory without values."""
        spare = self._spare.pop((shape, dtype), None)
        return torch.empty(shape, dtype=dtype, device=self.device) if spare is None else spare

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
    by_layer: bool
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

    @property
    def is_float(self) -> bool:
        """Whether the weight is known to stay in floating point."""
        return self.choose is stays_float or self.layer.keeps_precision

    def take(self, target: Tensor, tensor: Tensor) -> None:
        if self.places is not None and self.by_layer and self._goes_to_its_place(self.places, target, tensor):
            return
        as_it_comes = self.is_float and tensor.dtype is self.dtype
        is_whole = target.shape == self.layer.weight.shape == tensor.shape and target.is_contiguous()
        if is_whole and self._is_copied_later(tensor, as_it_comes=as_it_comes):
            self.missing = 0
            self._finish(tensor)
            return
        weight_OI = self._weight_for(tensor, as_it_comes=as_it_comes)
        weight_OI.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(tensor)
        self.missing -= target.numel()
        if self.missing == 0:
            self.weight_OI = None
            self._finish(weight_OI)
            if self.places is not None:
                self.scratch.give_back(weight_OI)

    def _is_copied_later(self, tensor: Tensor, *, as_it_comes: bool) -> bool:
        """Whether a whole weight is quantised, or moved to its place, as it is, so that it needs no copy before."""
        if self.is_float:
            return as_it_comes and self.places is not None
        return self.by_layer and tensor.dtype in _FLOATS and tensor.device == self.scratch.device

    def _weight_for(self, tensor: Tensor, *, as_it_comes: bool) -> Tensor:
        """Memory of the incomplete weight, in which weights that are quantised lose nothing."""
        if self.weight_OI is None:
            keeps_dtype = as_it_comes or tensor.dtype is torch.int8 or (not self.is_float and tensor.dtype in _FLOATS)
            dtype = tensor.dtype if keeps_dtype else torch.float32
            self.weight_OI = self.scratch.take(self.layer.weight.shape, dtype)
        elif not self.is_float and self.weight_OI.dtype in _NARROW and tensor.dtype is not self.weight_OI.dtype:
            self.weight_OI = self.weight_OI.float()
        return self.weight_OI

    def _goes_to_its_place(self, places: Places, target: Tensor, tensor: Tensor) -> bool:
        """Pack a piece where it belongs, if all pieces of the layer can be."""
        num_inputs = self.layer.weight.shape[1]
        if self.in_pieces is None:
            rows = [(begin // num_inputs, count // num_inputs) for begin, count in self.ranges.items()]
            are_rows = all(begin % num_inputs == count % num_inputs == 0 for begin, count in self.ranges.items())
            self.in_pieces = are_rows and tensor.shape == target.shape and target.is_contiguous()
            if self.in_pieces:
                sample_RI = self._rows(tensor[:1].reshape(1, -1))
                method = None if self.is_float else self.choose(self.layer, [])
                method = method or self._float_method(sample_RI)
                self.in_pieces = places.takes_pieces(self.layer, method, rows, sample_RI)
        if self.in_pieces:
            # A checkpoint's tensor may have more dimensions, as a convolution's weight.
            rows_RI = self._rows(tensor.expand(target.shape).reshape(-1, num_inputs))
            begin = int(target.storage_offset())
            if not places.take_piece(self.layer, rows_RI, begin // num_inputs):
                raise CheckpointError(
                    f"{self.pieces[begin].name} has values that are not finite, or too large for quantisation with "
                    "float16 scales, which cannot be written into the weights that serve. Send finite ones, or update "
                    "with atomic=True."
                )
        return self.in_pieces

    def _rows(self, rows_RI: Tensor) -> Tensor:
        """Rows in a dtype from which they are packed or quantised."""
        if self.is_float:
            return rows_RI.to(self.dtype)
        return rows_RI if rows_RI.dtype in _FLOATS else rows_RI.float()

    def _float_method(self, weight_OI: Tensor) -> LinearMethod:
        """The method of the layer with such a weight, of the dtype of those that stay in floating point."""
        arithmetic = "float32" if self.layer.keeps_precision else self.layer.cpu_arithmetic
        own_method = self.layer.own_method(NATIVE)
        return own_method or choose_linear_method(weight_OI, self.layer.compute_dtype, arithmetic)

    def _finish(self, weight_OI: Tensor) -> None:
        pieces = [self.pieces[row] for row in sorted(self.pieces)]
        method = None if self.layer.keeps_precision else self.choose(self.layer, pieces)
        if method is None and not weight_OI.is_floating_point():
            raise UnsupportedFeature(
                f"{pieces[0].name} is stored in MXFP4, but this layer needs float weights. Dequantise the checkpoint: "
                "quantization='none'."
            )
        self.layer.take_weight(weight_OI.to(self.dtype) if method is None else weight_OI)
        self.layer.method = method = method or self._float_method(self.layer.weight)
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
