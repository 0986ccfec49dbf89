"""Where a layer wants its weights from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from penstock.parallel import Share


class RowLookup(Protocol):
    """Reads rows of a weight that is kept in another form."""

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Rows by their numbers: float32 [T, I]."""


class RowReader(Protocol):
    """What only reads rows of its weight. lookup: reads them from another form of it, while the weight is empty."""

    weight: nn.Parameter
    lookup: RowLookup | None


@runtime_checkable
class WidensWeight(Protocol):
    """A layer whose `weight` may be of a narrower dtype than it computes in.

    compute_dtype: None for the weight's. shares_weight: what else needs the weight takes it in that dtype alone.
    """

    compute_dtype: torch.dtype | None
    shares_weight: bool


# Names a part of a fused parameter, such as "q" of a fused query, key and value projection.
Shard = str


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank takes of a whole tensor: of one dimension these shares, one after the other."""

    dim: int
    shares: tuple[Share, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """A view, where the part is in one piece: of a mapped file, the rest is not read. A zero, where it is none."""
        pieces = [tensor.narrow(self.dim, share.start, share.size) for share in self.shares]
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0] if pieces else tensor.new_zeros(())


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One tensor of a checkpoint.

    shape: what the checkpoint must hold. target: the parameter, or a view of the part of it that the tensor fills;
    a tensor with fewer dimensions is repeated along the leading ones. part: what of the tensor goes there; None: all.
    """

    shape: tuple[int, ...]
    target: Tensor
    part: Part | None = None

    def load(self, tensor: Tensor) -> None:
        """Take this slot's part of a tensor of `shape`."""
        self.fill(tensor if self.part is None else self.part.of(tensor))

    def fill(self, part: Tensor) -> None:
        """Copy that part, converting its dtype."""
        with torch.no_grad():
            self.target.copy_(part)


@runtime_checkable
class IsSplit(Protocol):
    """A layer that has a part of each parameter only."""

    def slots(self) -> dict[str, WeightSlot]:
        """By parameter name, where whole tensors go."""


@runtime_checkable
class HasFusedWeights(Protocol):
    """A layer whose parameters come from several tensors of a checkpoint."""

    def fused_slots(self, shard: Shard) -> dict[str, WeightSlot]:
        """By parameter name, the slots that one of those tensors' modules fills."""


def weight_slots(layer: nn.Module, shard: Shard | None) -> dict[str, WeightSlot]:
    """The layer's own parameters by name: whole, or the part of each that `shard` names."""
    if shard is None and isinstance(layer, IsSplit):
        return layer.slots()
    if shard is None:
        return {
            name: WeightSlot(tuple(parameter.shape), parameter)
            for name, parameter in layer.named_parameters(recurse=False)
        }
    assert isinstance(layer, HasFusedWeights), f"{type(layer).__name__} has no shard {shard!r}"
    return layer.fused_slots(shard)


def new_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter that needs no gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def empty_like_weight(weight: Tensor, dtype: torch.dtype | None = None) -> nn.Parameter:
    """What stands in for a weight that is kept in another form: a parameter of no elements."""
    return nn.Parameter(weight.new_empty(0, dtype=dtype), requires_grad=False)
