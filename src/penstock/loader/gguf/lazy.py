"""Tensors that are read from a GGUF file, and dequantised, when an operation needs their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from penstock.loader.gguf.blocks import StoredTensor
from penstock.loader.gguf.changes import Change, Join
from penstock.parallel import Share


class LazyTensor(Tensor):
    """Tensor of a file in the form of Transformers. A slice reads only its own rows or blocks.

    It has no memory of its own, so that a rank of several, or a stage of a pipeline, reads only what it needs.
    """

    stored: StoredTensor
    change: Change

    @staticmethod
    def __new__(cls, stored: StoredTensor, change: Change) -> LazyTensor:
        shape = [stored.shape[change.stored_dim(dim)] for dim in range(len(stored.shape))]
        made: LazyTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=stored.dtype)
        made.stored, made.change = stored, change
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            return args[0]._slice(*args[1:])
        return func(*tree_map(_values, args), **tree_map(_values, dict(kwargs or {})))

    def values(self) -> Tensor:
        """Read the tensor."""
        return self.change.apply(self.stored.dequantised())

    def _slice(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
        size = self.shape[dim]
        begin, stop, _ = slice(start, end).indices(size)
        stored_dim = self.change.stored_dim(dim % max(self.dim(), 1))
        if self.dim() > 2 or step != 1 or stop <= begin:
            return self.values()[(slice(None),) * dim + (slice(start, end, step),)]
        part, offset = part_of(self.stored, self.change, stored_dim, Share(begin, stop - begin, size))
        covering = LazyTensor(part, self.change)
        if covering.shape[dim] == stop - begin:
            return covering
        return covering.values().narrow(dim, offset, stop - begin)


class JoinedTensor(LazyTensor):
    """Tensor that a file has as several. join: makes it of their values."""

    parts: Sequence[StoredTensor]
    join: Join

    @staticmethod
    def __new__(cls, parts: Sequence[StoredTensor], join: Join) -> JoinedTensor:
        shape = join([torch.empty(part.shape, device="meta") for part in parts]).shape
        dtype = reduce(torch.promote_types, [part.dtype for part in parts])
        made: JoinedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.parts, made.join = parts, join
        return made

    def values(self) -> Tensor:
        return self.join([part.dequantised().to(self.dtype) for part in self.parts])

    def _slice(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
        return self.values()[(slice(None),) * dim + (slice(start, end, step),)]


def part_of(stored: StoredTensor, change: Change, dim: int, share: Share) -> tuple[StoredTensor, int]:
    """Return the least part of a file's tensor that covers a share of a dimension, and where the share begins in it."""
    multiple = math.lcm(stored.multiple(dim), change.multiple(dim))
    begin = share.start // multiple * multiple
    end = min(-(-(share.start + share.size) // multiple) * multiple, share.whole)
    return stored.part(dim, begin, end - begin), share.start - begin


def _values(value: Any) -> Any:
    return value.values() if isinstance(value, LazyTensor) else value
