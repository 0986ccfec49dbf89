"""Weight slots: mapping of checkpoint tensors to the parameters of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from penstock.parallel import Share


class RowLookup(Protocol):
    """Reads rows of a packed weight."""

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Rows by number: float32 [T, I]."""


class RowReader(Protocol):
    """A module that only reads rows of its weight. lookup: reads them from a packed form, while the weight is empty."""

    weight: nn.Parameter
    lookup: RowLookup | None


class WidensWeight(nn.Module):
    """A layer whose `weight` may have a narrower dtype than it computes in.

    compute_dtype: None for the weight's. shares_weight: another module uses the weight, in that dtype only.
    """

    compute_dtype: torch.dtype | None = None
    shares_weight = False


# A part of a fused parameter, such as "q" of a fused QKV projection.
Shard = str


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a whole tensor: shares of one dimension, concatenated.

    interleaved: size of heads along the dimension whose pairs that rotate are adjacent in the whole tensor; in the part
    they are half a head apart, as `kernels.rotary` takes them. None for no such heads.
    """

    dim: int
    shares: tuple[Share, ...]
    interleaved: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Slice the part: a view where it is contiguous, so that the rest of a mapped file is not read.

        Zero if empty.
        """
        pieces = [tensor.narrow(self.dim, share.start, share.size) for share in self.shares]
        part = torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0] if pieces else tensor.new_zeros(())
        if self.interleaved is None:
            return part
        pairs: Tensor = part.unflatten(self.dim, (-1, self.interleaved // 2, 2))
        return pairs.transpose(self.dim + 1, self.dim + 2).flatten(self.dim, self.dim + 2)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write the part to its place in a whole tensor: the inverse of `of`."""
        if self.interleaved is not None:
            halves: Tensor = part.unflatten(self.dim, (-1, 2, self.interleaved // 2))
            part = halves.transpose(self.dim + 1, self.dim + 2).flatten(self.dim, self.dim + 2)
        begin = 0
        for share in self.shares:
            whole.narrow(self.dim, share.start, share.size).copy_(part.narrow(self.dim, begin, share.size))
            begin += share.size


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Destination of one checkpoint tensor.

    shape: required shape in the checkpoint. target: the parameter, or a view of the part of it that the tensor fills; a
    tensor with fewer dimensions is repeated along the leading ones. part: this rank's part of the tensor; None for all.
    takes_integers: whether the tensor may be int8.
    """

    takes_integers: ClassVar[bool] = False

    shape: tuple[int, ...]
    target: Tensor
    part: Part | None = None

    def load(self, tensor: Tensor) -> None:
        """Copy this slot's part of a tensor of `shape`."""
        self.fill(tensor if self.part is None else self.part.of(tensor))

    def fill(self, part: Tensor) -> None:
        """Copy an already sliced part, converting its dtype."""
        with torch.no_grad():
            self.target.copy_(part)


@dataclass(frozen=True, slots=True)
class ScaledSlot(WeightSlot):
    """Destination of a checkpoint tensor that is multiplied by `factors`, which its part is broadcast with."""

    factors: Tensor | float = 1.0

    def fill(self, part: Tensor) -> None:
        WeightSlot.fill(self, part.float() * self.factors)


@runtime_checkable
class IsSplit(Protocol):
    """A layer with a rank's part of each parameter."""

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of whole tensors by parameter name."""


@runtime_checkable
class HasFusedWeights(Protocol):
    """A layer whose parameters are fused from several checkpoint tensors."""

    def fused_slots(self, shard: Shard) -> dict[str, WeightSlot]:
        """Slots by parameter name of one shard's tensors."""


def _is_split(layer: nn.Module) -> TypeGuard[IsSplit]:
    # Many times as fast as `isinstance` of a protocol.
    return issubclass(type(layer), IsSplit)


def _has_fused_weights(layer: nn.Module) -> TypeGuard[HasFusedWeights]:
    return issubclass(type(layer), HasFusedWeights)


def weight_slots(layer: nn.Module, shard: Shard | None) -> dict[str, WeightSlot]:
    """Slots of the layer's own parameters by name: whole, or the part of each that `shard` names."""
    if shard is None and _is_split(layer):
        return layer.slots()
    if shard is None:
        return {
            name: WeightSlot(tuple(parameter.shape), parameter)
            for name, parameter in layer.named_parameters(recurse=False)
        }
    assert _has_fused_weights(layer), f"{type(layer).__name__} has no shard {shard!r}"
    return layer.fused_slots(shard)


def slots_of_modules(model: nn.Module) -> dict[str, WeightSlot]:
    """Slots of all parameters of a model by their names in it, whole or this rank's part."""
    return {
        f"{prefix}.{name}" if prefix else name: slot
        for prefix, module in model.named_modules()
        for name, slot in weight_slots(module, None).items()
    }


def new_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def empty_like_weight(weight: Tensor, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An empty parameter in place of a packed weight."""
    return nn.Parameter(weight.new_empty(0, dtype=dtype), requires_grad=False)
