"""Share that a saved rank has of a model: its weights, by the tensors of a checkpoint that they consist of.

Suffixes: O output features, I input features, G groups of input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.quantized import QuantizedWeight
from penstock.layers.linear import LinearLayer
from penstock.layers.quantization.method import QuantizedMethod
from penstock.layers.weights import Part, WeightSlot
from penstock.loader.packed_header import LayerEntry, PackedEntry
from penstock.loader.packed_state import Layouts, PackedState, check_layers, form_of, in_forms
from penstock.models.causal_lm import CausalLM

_CPU = torch.device("cpu")


class Unshareable(Exception):
    """A weight that this arrangement cannot share; its text says why, as a clause."""


@dataclass(frozen=True, slots=True)
class ShareableWeight:
    """A weight, or the tensor of a checkpoint that is a part of it.

    values: of floats one tensor; of quantised weights the integers [O, I] of each `QuantizedWeight`. of_groups: the
    scales and minimums [O, G] of all of these; none of floats.
    """

    values: Sequence[Tensor]
    of_groups: Sequence[Tensor] = ()
    group_size: int = 0


class RankShare:
    """State of one saved rank, with its model on the meta device. Unpacked weights are kept until `forget`."""

    def __init__(self, model: CausalLM, state: PackedState, kind: str, layouts: Layouts | None) -> None:
        self.places, self.tensors = Places(model), state.tensors
        self._kind, self._layouts = kind, layouts
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, LinearLayer)}
        self._entries: Mapping[str, LayerEntry] = {} if state.header is None else state.header.layers
        if state.header is not None:
            check_layers(self._layers, self._entries)
        self._layer_names = {id(layer.weight): name for name, layer in self._layers.items()}
        self._tensor_names: dict[int, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            self._tensor_names.setdefault(id(tensor), []).append(name)
        self._unpacked: dict[str, ShareableWeight] = {}

    def entry(self, weight: Tensor) -> LayerEntry:
        """Entry of the linear layer with this weight."""
        return self._entries[self._layer_names[id(weight)]]

    def of_method(self, weight: Tensor) -> dict[str, Tensor]:
        """Tensors of the method of the linear layer with this weight; none if it is not packed."""
        name = self._layer_names[id(weight)]
        entry = self._entries[name]
        attributes = entry.tensors if isinstance(entry, PackedEntry) else ()
        return {attribute: self._stored(f"{name}.method.{attribute}") for attribute in attributes}

    def floats(self, target: Tensor) -> Tensor | None:
        """A parameter or buffer as it was stored; None if only its packed form was."""
        found = (self.tensors[name] for name in self._tensor_names[id(target)] if name in self.tensors)
        return next(found, None)

    def weight(self, target: Tensor) -> ShareableWeight:
        """A parameter or buffer, or the weight of a linear layer."""
        stored = self.floats(target)
        if stored is not None:
            if stored.shape != target.shape:
                raise Unshareable(f"its share has the shape {list(stored.shape)}, and needs {list(target.shape)}")
            return ShareableWeight([stored])
        name = self._layer_names.get(id(target))
        entry = None if name is None else self._entries.get(name)
        if name is None or not isinstance(entry, PackedEntry):
            raise Unshareable(f"the saved state lacks {self._tensor_names[id(target)][0]}")
        if name not in self._unpacked:
            self._unpacked[name] = self._unpack(name, entry, target)
        return self._unpacked[name]

    def piece(self, name: str) -> ShareableWeight:
        """This rank's share of a checkpoint's tensor."""
        slot = self.places.slots[name]
        weight = self.weight(self.places.parameter(name))
        groups = [groups_OG[rows_of(slot.target)] for groups_OG in weight.of_groups]
        return ShareableWeight([_piece(values, slot) for values in weight.values], groups, weight.group_size)

    def forget(self) -> None:
        """Free unpacked weights."""
        self._unpacked.clear()

    def _unpack(self, name: str, entry: PackedEntry, weight: Tensor) -> ShareableWeight:
        layer = self._layers[name]
        stored = self.of_method(weight)
        method, forms = form_of(entry, layer, stored, self._kind, self._layouts)
        is_meta = stored["packed_OI"].is_meta
        if not isinstance(method, QuantizedMethod):
            if is_meta:
                return ShareableWeight([weight.new_empty(weight.shape, dtype=getattr(torch, entry.dtype))])
            for attribute, tensor in in_forms(name, stored, forms, _CPU).items():
                setattr(method, attribute, tensor)
            assert method.packed_OI is not None, "was set"
            return ShareableWeight([method.unpack(method.packed_OI, layer.output_size)])
        shape = method.shape
        assert shape is not None, "has a form"
        if is_meta:
            values_OI = weight.new_empty(weight.shape, dtype=torch.int8)
            scales_OG = weight.new_empty(shape.output_size, shape.num_groups, dtype=torch.float32)
            weights = [QuantizedWeight(shape, values_OI, scales_OG, scales_OG if shape.has_minimums else None)]
            weights *= len(packed_tensors(forms))
        else:
            tensors = in_forms(name, stored, forms, _CPU)
            weights = [method.unpacked(tensors[key]) for key in packed_tensors(forms)]
        groups = [of_OG for one in weights for of_OG in (one.scales_OG, one.minimums_OG) if of_OG is not None]
        return ShareableWeight([one.values_OI for one in weights], groups, shape.group_size)

    def _stored(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise Unshareable(f"the saved state lacks {name}")
        return self.tensors[name]


class Places:
    """Slots of the tensors of a checkpoint in a model. slots: by tensor; matrices have their outputs first."""

    def __init__(self, model: CausalLM) -> None:
        self.slots = {name: _outputs_first(slot) for name, slot in model.checkpoint_slots().items()}
        self._names: dict[int, list[str]] = {}
        for name in self.slots:
            self._names.setdefault(id(self.parameter(name)), []).append(name)

    def names(self, target: Tensor) -> Sequence[str]:
        """Tensors of a checkpoint that a parameter or buffer consists of."""
        return self._names.get(id(target), ())

    def parameter(self, name: str) -> Tensor:
        """The parameter or buffer that a tensor is in."""
        target = self.slots[name].target
        return target if target._base is None else target._base


def packed_tensors(forms: Mapping[str, Tensor]) -> list[str]:
    """Attributes of a quantised method with a packed weight each."""
    return [key for key, form in forms.items() if form.dtype is torch.uint8]


def view_of(values: Tensor, target: Tensor) -> Tensor:
    """The part of a parameter's values, which are contiguous, that a slot's target is of the parameter."""
    offset = values.storage_offset() + target.storage_offset()
    return values.as_strided(target.shape, target.stride(), offset)


def rows_of(target: Tensor) -> slice:
    """Rows of a matrix that a slot's target consists of."""
    base = target if target._base is None else target._base
    if target.dim() != 2 or target.stride() != base.stride() or target.shape[1] != base.shape[1]:
        raise Unshareable("its tensors in a checkpoint are not rows of it")
    begin = int(target.storage_offset()) // base.shape[1]
    return slice(begin, begin + target.shape[0])


def _outputs_first(slot: WeightSlot) -> WeightSlot:
    """A slot with the dimensions of the parameter, where the checkpoint has its matrix transposed."""
    target = slot.target
    is_transposed = target.dim() == 2 and target.stride(0) == 1 != target.stride(1)
    if not is_transposed or len(slot.shape) != 2:
        return slot
    part = slot.part
    if part is not None:
        part = Part(1 - part.dim, part.shares, part.interleaved)
    return WeightSlot(slot.shape[::-1], target.t(), part)


def _piece(values: Tensor, slot: WeightSlot) -> Tensor:
    """The part of a tensor that a slot has loaded into a parameter with these values."""
    piece = view_of(values, slot.target)
    sizes = list(slot.shape)
    if slot.part is not None:
        sizes[slot.part.dim] = sum(share.size for share in slot.part.shares)
    while piece.dim() > len(sizes):  # was repeated
        piece = piece[0]
    for dim, size in enumerate(sizes):
        if size < piece.shape[dim]:
            piece = piece.narrow(dim, 0, size)
    return piece
