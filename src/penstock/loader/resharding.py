"""Resharding of saved states: a rank's weights, made of the shares of all ranks of another arrangement.

Shares are joined to the tensors of a checkpoint, and divided again, as the models' `WeightSlot`s say. No weight is
quantised again: integers, scales and minimums are copied, so that they are those of a checkpoint that is loaded with
this arrangement. What cannot be so, such as shares that split the groups of a quantised weight, is refused.
Suffixes: O output features, I input features, G groups of input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.kernels.quantized import HALF_GROUP, QuantizedWeight
from penstock.layers.linear import LinearLayer
from penstock.layers.quantization.method import QuantizedMethod, ReorderedMethod
from penstock.layers.quantization.quantize import group_size_of
from penstock.layers.weights import Part, WeightSlot
from penstock.loader.arrangement import Arrangement
from penstock.loader.kv_cache_scales import names_of_scales
from penstock.loader.packed_header import Float8Entry, LayerEntry, PackedEntry, PackedHeader, QuantizedEntry
from penstock.loader.packed_state import Layouts, PackedState, form_of, tensors_of_method
from penstock.loader.rank_share import Places, RankShare, ShareableWeight, Unshareable, packed_tensors, rows_of, view_of
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState, Share

_CPU = torch.device("cpu")
# Fields of the headers that all ranks of an engine have in common, and of the entries that all shares of a layer have.
_OF_ENGINE = ("version", "kernels", "quantization", "dtype", "weights_dtype", "is_tied")
_OF_LAYER = ("method", "is_smoothed", "dtype", "tensors")
_DIFFERENT = "its shares are in different formats"


@dataclass(frozen=True, slots=True)
class SavedRanks:
    """States of all ranks of an arrangement, by rank; they have no headers if all weights are floats."""

    arrangement: Arrangement
    ranks: Sequence[PackedState]

    @property
    def header(self) -> PackedHeader | None:
        """The first rank's header."""
        return self.ranks[0].header


class Resharding:
    """Weights of a rank of another arrangement than the saved one. model: of that rank, on the meta device.

    here: the arrangement that the rank is of. build: builds the model of a rank with the same ties. kind, layouts: as
    of `PackedLayers`.
    """

    def __init__(
        self,
        model: CausalLM,
        saved: SavedRanks,
        here: Arrangement,
        build: Callable[[ParallelState], CausalLM],
        kind: str,
        layouts: Layouts | None = None,
    ) -> None:
        self._model, self._saved, self._here = model, saved, here
        self._kind, self._layouts = kind, layouts
        self._quantization = None if saved.header is None else saved.header.quantization
        # Loading replaces the parameters of the model.
        self._targets = model.state_dict(keep_vars=True)
        self._places = Places(model)
        self._shares = [
            RankShare(build(parallel), state, kind, layouts)
            for parallel, state in zip(saved.arrangement.ranks(), saved.ranks, strict=True)
        ]

    def packed_state(self) -> PackedState:
        """The rank's packed state, in the layout of the saved ones; of meta tensors if these are.

        Raises CheckpointError for a weight that this arrangement cannot share.
        """
        header = self._checked_header()
        entries: dict[str, LayerEntry] = {}
        tensors: dict[str, Tensor] = {}
        packed: set[int] = set()
        for name, layer in self._model.named_modules():
            if isinstance(layer, LinearLayer):
                with self._sharing(name):
                    entries[name], found = self._layer(layer)
                    if isinstance(entries[name], PackedEntry) and not self._has_floats(layer.weight):
                        packed.add(id(layer.weight))
                tensors |= {f"{name}.method.{attribute}": tensor for attribute, tensor in found.items()}
        tensors |= dict(self._parameters(packed))
        return PackedState(replace(header, layers=entries), tensors)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the rank's state of floats, by the names of `save_sharded_state`."""
        return self._parameters(set())

    def _parameters(self, packed: set[int]) -> Iterator[tuple[str, Tensor]]:
        """packed: ids of parameters that are left out."""
        passed = set(packed)
        for name, target in self._targets.items():
            if id(target) not in passed:
                passed.add(id(target))
                with self._sharing(name):
                    tensor = self._parameter(target)
                yield name, tensor
        for name in names_of_scales(self._model):
            found = (share.tensors[name] for share in self._shares if name in share.tensors)
            if (scale := next(found, None)) is not None:
                yield name, scale

    def _parameter(self, target: Tensor) -> Tensor:
        """A parameter or buffer of floats. Buffers that no checkpoint has follow from the configuration."""
        if not self._places.names(target):
            if target.is_meta:
                raise Unshareable("it is in no checkpoint")
            return target.detach()
        same = self._same_share(target)
        found = self._assembled(target) if same is None else same[0].weight(same[1])
        if found.of_groups:
            raise Unshareable("it is quantised in the saved state, and of floats here")
        return found.values[0]

    def _layer(self, layer: LinearLayer) -> tuple[LayerEntry, Mapping[str, Tensor]]:
        """Entry of a linear layer in the header, and the tensors of its method."""
        same = self._same_share(layer.weight)
        if same is not None:
            share, source = same
            return share.entry(source), share.of_method(source)
        sources = self._sources(layer.weight)
        entry = _joined_entry([share.entry(source) for share, source in sources])
        if not isinstance(entry, PackedEntry):
            return entry, {}
        if isinstance(entry, Float8Entry):
            raise Unshareable("it is in FP8, which ranks do not share")
        is_reordered = entry.method == ReorderedMethod.__name__
        orders = self._orders(layer.weight, sources) if is_reordered else {}
        weight = self._assembled(layer.weight)
        if isinstance(entry, QuantizedEntry) and weight.of_groups:
            entry = replace(entry, shape=replace(entry.shape, group_size=weight.group_size))
        return entry, {**self._packed(layer, entry, weight), **orders}

    def _packed(self, layer: LinearLayer, entry: PackedEntry, weight: ShareableWeight) -> Mapping[str, Tensor]:
        """Tensors of a layer's method with this weight."""
        method, forms = form_of(entry, layer, {}, self._kind, self._layouts)
        if weight.values[0].is_meta:
            return forms
        if not isinstance(method, QuantizedMethod):
            method.packed_OI = method.pack(weight.values[0])
            return tensors_of_method(method)
        assert method.shape is not None, "has a form"
        num_each = len(weight.of_groups) // len(weight.values)
        weights = [
            QuantizedWeight(method.shape, values_OI, *weight.of_groups[number * num_each : (number + 1) * num_each])
            for number, values_OI in enumerate(weight.values)
        ]
        return {key: method.packed(one) for key, one in zip(packed_tensors(forms), weights, strict=True)}

    def _orders(self, target: Tensor, sources: Sequence[tuple[RankShare, Tensor]]) -> dict[str, Tensor]:
        """Order of the input features of a layer with act-order, of which ranks can share output features alone."""
        if any(part is not None and part.dim != 0 for part in self._parts(target)):
            raise Unshareable(
                "its groups have inputs from anywhere (act-order), so ranks cannot share its input features"
            )
        stored = [share.of_method(source) for share, source in sources]
        orders = {key: tensor for key, tensor in stored[0].items() if tensor.dtype is torch.int64}
        if any(not _are_equal(found[key], order) for found in stored for key, order in orders.items()):
            raise Unshareable(_DIFFERENT)
        return orders

    def _parts(self, target: Tensor) -> list[Part | None]:
        """Parts of the checkpoint's tensors of a parameter, here and on the saved ranks."""
        places = [self._places, *(share.places for share in self._shares)]
        return [of.slots[name].part for name in self._places.names(target) for of in places if name in of.slots]

    def _sources(self, target: Tensor) -> list[tuple[RankShare, Tensor]]:
        """Parameters of the saved ranks with shares of the same tensors."""
        names = self._places.names(target)
        found = [
            (share, share.places.parameter(name))
            for share in self._shares
            for name in names
            if name in share.places.slots
        ]
        if not found:
            raise Unshareable("no rank has it")
        return found

    def _same_share(self, target: Tensor) -> tuple[RankShare, Tensor] | None:
        """A saved rank's parameter with the same shares of the same tensors; None without one."""
        here = self._places
        for share in self._shares:
            there, names = share.places, here.names(target)
            if any(name not in there.slots or not _are_alike(here.slots[name], there.slots[name]) for name in names):
                continue
            sources = {id(source): source for source in map(there.parameter, names)}
            if len(sources) == 1 and (source := sources.popitem()[1]).shape == target.shape:
                return share, source
        return None

    def _has_floats(self, weight: Tensor) -> bool:
        """Whether the saved states have a packed weight as floats too."""
        return any(share.floats(source) is not None for share, source in self._sources(weight))

    def _assembled(self, target: Tensor) -> ShareableWeight:
        """A parameter of this rank, of the checkpoint's tensors of which it has shares."""
        whole: ShareableWeight | None = None
        for name in self._places.names(target):
            slot = self._places.slots[name]
            piece = self._divided(slot, self._joined(name))
            if whole is None:
                groups = [of_OG.new_zeros(target.shape[0], of_OG.shape[1]) for of_OG in piece.of_groups]
                whole = ShareableWeight([one.new_zeros(target.shape) for one in piece.values], groups, piece.group_size)
            if piece.group_size != whole.group_size or len(piece.values) != len(whole.values):
                raise Unshareable(_DIFFERENT)
            for values, part in zip(whole.values, piece.values, strict=True):
                view_of(values, slot.target).copy_(part)
            for groups_OG, part in zip(whole.of_groups, piece.of_groups, strict=True):
                groups_OG[rows_of(slot.target)] = part
        for share in self._shares:
            share.forget()
        assert whole is not None, "has names"
        return whole

    def _joined(self, name: str) -> ShareableWeight:
        """A checkpoint's tensor, of the shares of all ranks."""
        pieces = [(share.places.slots[name], share.piece(name)) for share in self._shares if name in share.places.slots]
        slot, first = pieces[0]
        if not _are_whole([slot for slot, _ in pieces]):
            raise Unshareable(f"no rank has some rows or columns of {name}")
        if any(len(one.values) != len(first.values) or one.group_size != first.group_size for _, one in pieces):
            raise Unshareable(_DIFFERENT)
        whole = [values.new_zeros(slot.shape) for values in first.values]
        for slot, piece in pieces:
            for values, part in zip(whole, piece.values, strict=True):
                _put(values, slot.part, part)
        return self._with_groups(pieces, whole) if first.of_groups else ShareableWeight(whole)

    def _with_groups(
        self, pieces: Sequence[tuple[WeightSlot, ShareableWeight]], values: Sequence[Tensor]
    ) -> ShareableWeight:
        """A quantised tensor with these integers, and the scales and minimums of its pieces."""
        (slot, first), (num_outputs, num_inputs) = pieces[0], values[0].shape
        group_size, num_groups = first.group_size, first.of_groups[0].shape[1]
        is_split = slot.part is not None and slot.part.dim == 1
        if is_split:
            has_scales_of_rows = num_groups == 1 and self._quantization is None
            if has_scales_of_rows and all(
                _are_equal(one, other)
                for _, piece in pieces
                for one, other in zip(piece.of_groups, first.of_groups, strict=True)
            ):
                return ShareableWeight(values, first.of_groups, num_inputs)
            self._check_group_size(group_size, num_inputs)
            num_groups = -(-num_inputs // group_size)
        joined = [of_OG.new_zeros(num_outputs, num_groups) for of_OG in first.of_groups]
        for slot, piece in pieces:
            part = _part_of_groups(slot.part, group_size, num_groups) if is_split else slot.part
            for whole_OG, of_OG in zip(joined, piece.of_groups, strict=True):
                _put(whole_OG, part, of_OG)
        return ShareableWeight(values, joined, group_size)

    def _divided(self, slot: WeightSlot, whole: ShareableWeight) -> ShareableWeight:
        """This rank's share of a checkpoint's tensor."""
        part = slot.part
        if part is None:
            return whole
        values = [part.of(one) for one in whole.values]
        if not whole.of_groups or part.dim == 0:
            return ShareableWeight(values, [part.of(of_OG) for of_OG in whole.of_groups], whole.group_size)
        num_inputs, num_groups = sum(share.size for share in part.shares), whole.of_groups[0].shape[1]
        if num_groups == 1 and self._quantization is None:  # a scale per output feature
            return ShareableWeight(values, whole.of_groups, num_inputs)
        self._check_group_size(whole.group_size, num_inputs)
        groups = _part_of_groups(part, whole.group_size, num_groups)
        assert groups is not None, "of input features"
        return ShareableWeight(values, [groups.of(of_OG) for of_OG in whole.of_groups], whole.group_size)

    def _check_group_size(self, group_size: int, num_inputs: int) -> None:
        """Refuse groups that the option `quantization` would not make of so many input features."""
        option = self._quantization
        if option is None:
            return
        natural = group_size_of(option, num_inputs, is_on_cpu=self._kind == "cpu")
        if group_size != natural:
            raise Unshareable(
                f"quantization={option!r} has groups of {group_size} input features in the saved state, and would have "
                f"groups of {natural} here"
            )

    def _checked_header(self) -> PackedHeader:
        """The first rank's header. Raises CheckpointError for ranks that were saved by different engines."""
        first = self._saved.header
        assert first is not None, "of packed weights"
        for rank, state in enumerate(self._saved.ranks):
            if state.header is None:
                raise CheckpointError(
                    f"The saved state of rank {rank} is of floats, and that of rank 0 is packed, so they are of "
                    "different engines. Save the state again."
                )
            mine, firsts = ({key: getattr(one, key) for key in _OF_ENGINE} for one in (state.header, first))
            key = next((key for key in _OF_ENGINE if mine[key] != firsts[key]), None)
            if key is not None:
                raise CheckpointError(
                    f"The saved state of rank {rank} has {key}={mine[key]!r}, and that of rank 0 has "
                    f"{firsts[key]!r}, so they are of different engines. Save the state again."
                )
        return first

    @contextmanager
    def _sharing(self, name: str) -> Iterator[None]:
        """Raise CheckpointError in place of Unshareable, for a tensor or layer of this name."""
        try:
            yield
        except Unshareable as error:
            raise CheckpointError(
                f"{name} of a state that was saved with {self._saved.arrangement} cannot be shared by "
                f"{self._here}: {error}. Load the checkpoint that it was made from, and save the "
                "state with this engine, or start the engine as that one was."
            ) from error


def _joined_entry(entries: Sequence[LayerEntry]) -> LayerEntry:
    """Entry of a layer that is made of shares with these."""
    first = entries[0]
    if any(getattr(entry, key, None) != getattr(first, key, None) for entry in entries for key in _OF_LAYER):
        raise Unshareable(_DIFFERENT)
    if not isinstance(first, QuantizedEntry):
        return first
    shapes = [entry.shape for entry in entries if isinstance(entry, QuantizedEntry)]
    formats = {(shape.bits, shape.has_minimums) for shape in shapes}
    scale_bytes = {shape.scale_bytes for shape in shapes}
    # Scales of E2M1 may be powers of two in one share alone; others would have been rounded in one alone.
    if len(formats) > 1 or (len(scale_bytes) > 1 and formats != {(4, False)}):
        raise Unshareable(_DIFFERENT)
    return replace(first, shape=replace(first.shape, scale_bytes=max(scale_bytes)))


def _are_alike(slot: WeightSlot, other: WeightSlot) -> bool:
    """Whether two slots put the same part of a tensor to the same place."""
    one, two = slot.target, other.target
    places = [(target.shape, target.stride(), target.storage_offset()) for target in (one, two)]
    return slot.shape == other.shape and slot.part == other.part and places[0] == places[1]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether tensors have the same values; meta tensors count as such."""
    return one.is_meta or torch.equal(one, other)


def _are_whole(slots: Sequence[WeightSlot]) -> bool:
    """Whether all parts together are the whole tensor."""
    parts = [slot.part for slot in slots]
    if any(part is None for part in parts):
        return True
    size = slots[0].shape[next(part.dim for part in parts if part is not None)]
    end = 0
    for share in sorted((share for part in parts if part is not None for share in part.shares), key=_start):
        if share.start > end:
            return False
        end = max(end, share.start + share.size)
    return end == size


def _start(share: Share) -> int:
    return share.start


def _put(whole: Tensor, part: Part | None, values: Tensor) -> None:
    """Write a part's values to their place in the whole tensor."""
    if part is None:
        whole.copy_(values)
    else:
        part.put(whole, values)


def _part_of_groups(part: Part | None, group_size: int, num_groups: int) -> Part | None:
    """Groups of a part of the input features."""
    if part is None:
        return None
    for share in part.shares:
        if share.start % group_size or share.size % group_size or group_size % HALF_GROUP:
            raise Unshareable(
                f"a share of {share.size} of its input features has no whole groups, which are of {group_size}"
            )
    shares = (Share(share.start // group_size, share.size // group_size, num_groups) for share in part.shares)
    return Part(part.dim, tuple(shares))
