"""Some of the ranks, and what they do together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from penstock.errors import RanksDisagree
from penstock.kernels.native.collectives import Collectives

_Value = TypeVar("_Value")


class Group(ABC):
    """rank: this one's place in the group, from 0 on. size: of the group.

    collectives: by which programs of the C++ library do the same; None where they cannot.
    sends_parts: whether to send takes so much longer than to gather that ranks who all have a tensor each send a part.

    Every rank of a group makes the same calls in the same order, with tensors of the same shape and dtype.
    """

    rank: int
    size: int
    collectives: Collectives | None = None
    sends_parts: bool = False

    def note_step(self, step_id: int) -> None:
        """The step that runs, for messages."""
        if self.collectives is not None:
            self.collectives.step_id = step_id

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, added in the ranks' order; it may be in the memory of the one given."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's of equal shares, in this dimension, of what `all_reduce` gives: the same bits."""
        size = tensor.shape[dim] // self.size
        return self.all_reduce(tensor).narrow(dim, self.rank * size, size)

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, one after the other in this dimension."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of one rank; it may be in the memory of the one given."""

    @abstractmethod
    def send(self, tensor: Tensor, destination: int) -> None:
        """To another rank, which need not have come yet while little is on its way; `tensor` is free afterwards."""

    @abstractmethod
    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """What another rank has sent, in the order that it did, into this contiguous tensor, which is returned."""

    def start_receiving(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        """`receive`, of which what this returns is the rest, to be called once and in the order of these calls.

        The tensor is the group's until then: it may be filled meanwhile, where somebody else than this thread does it.
        """
        return partial(self.receive, tensor, source)

    @abstractmethod
    def gather_values(self, value: _Value, value_type: Any = Any) -> list[_Value]:
        """Plain data of all ranks, by rank.

        value_type: the type of the value where it is not made of numbers, strings, lists and dicts alone.
        """


class OneRank(Group):
    """A group of one, which has nobody to talk to."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def send(self, tensor: Tensor, destination: int) -> None:
        raise AssertionError("a rank that is alone sends nothing")

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        raise AssertionError("a rank that is alone receives nothing")

    def gather_values(self, value: _Value, value_type: Any = Any) -> list[_Value]:
        return [value]


ONE_RANK = OneRank()

# Plain data up to this size takes one exchange.
_SHORT_BYTES = 248
_LENGTH_BYTES = 8


class ProcessGroup(Group):
    """Ranks that are processes, and exchange bytes of equal size."""

    @abstractmethod
    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """Of every rank as many as this one gives."""

    def gather_values(self, value: _Value, value_type: Any = Any) -> list[_Value]:
        # Bytes of a peer are data and nothing else: unpickling them would run whatever code a stranger puts in.
        data = msgspec.msgpack.encode(value)
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_SHORT_BYTES]
        heads = self._gather_bytes(head.ljust(_LENGTH_BYTES + _SHORT_BYTES, b"\0"))
        lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
        longest = max(lengths)
        wholes = (
            [head[_LENGTH_BYTES:] for head in heads]
            if longest <= _SHORT_BYTES
            else self._gather_bytes(data.ljust(longest, b"\0"))
        )
        return [
            _decoded(whole[:length], rank, value_type)
            for rank, (whole, length) in enumerate(zip(wholes, lengths, strict=True))
        ]


def _decoded(data: bytes, rank: int, value_type: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=value_type)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RanksDisagree(
            f"Rank {rank} sent {len(data)} bytes that are no {getattr(value_type, '__name__', value_type)}: {error}. "
            "Run the same version of Penstock on every rank, on a network that only trusted machines reach."
        ) from error


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """In their order; narrow numbers in float32, rounded once. Each stays as it is."""
    first, *others = tensors
    if not first.dtype.is_floating_point:
        return torch.stack([first, *others]).sum(0, dtype=first.dtype)
    total = first.to(torch.float32, copy=True)
    for other in others:
        total += other
    return total.to(first.dtype)
