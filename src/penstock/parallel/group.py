"""Groups of ranks and their collectives."""

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
    """Group of ranks. rank: this process's rank in the group, from 0 on. size: number of ranks.

    collectives: the same collectives for recorded programs of the C++ library; None without them.
    sends_parts: whether a send is so much slower than an all-gather that ranks with equal tensors send a shard each.

    Every rank of a group makes the same calls in the same order, with tensors of the same shape and dtype.
    """

    rank: int
    size: int
    collectives: Collectives | None = None
    sends_parts: bool = False

    def note_step(self, step_id: int) -> None:
        """Note the step in flight, for errors."""
        if self.collectives is not None:
            self.collectives.step_id = step_id

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, added in rank order; it may reuse the memory of `tensor`."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's equal share of `all_reduce` along this dimension, with the same bits."""
        size = tensor.shape[dim] // self.size
        return self.all_reduce(tensor).narrow(dim, self.rank * size, size)

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return all ranks' tensors, concatenated along this dimension."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of rank `source`; it may reuse the memory of `tensor`."""

    @abstractmethod
    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to a rank, without waiting for it while few messages are in flight; `tensor` may change afterwards."""

    @abstractmethod
    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Receive a rank's next message into this contiguous tensor, and return it."""

    def start_receiving(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        """Start a receive; the returned function finishes it, and must be called once, in the order of the starts.

        The tensor belongs to the group until then, which may fill it in another thread.
        """
        return partial(self.receive, tensor, source)

    @abstractmethod
    def gather_values(self, value: _Value, value_type: Any = Any) -> list[_Value]:
        """All-gather of plain data, by rank.

        value_type: the type of the value if it is more than numbers, strings, lists and dicts.
        """


class OneRank(Group):
    """Null object for a group of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def send(self, tensor: Tensor, destination: int) -> None:
        raise AssertionError("a single rank has no other to send to")

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        raise AssertionError("a single rank has no other to receive from")

    def gather_values(self, value: _Value, value_type: Any = Any) -> list[_Value]:
        return [value]


ONE_RANK = OneRank()

# Plain data up to this size takes one exchange.
_SHORT_BYTES = 248
_LENGTH_BYTES = 8


class ProcessGroup(Group):
    """Group of processes that exchange bytes of equal size."""

    @abstractmethod
    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather of bytes, of equal size on every rank."""

    def gather_values(self, value: _Value, value_type: Any = Any) -> list[_Value]:
        # msgpack, since unpickling a peer's bytes would run code in them.
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
    """Return the sum, added in order; 16-bit floats add in float32 and round once. Changes no input."""
    first, *others = tensors
    if not first.dtype.is_floating_point:
        return torch.stack([first, *others]).sum(0, dtype=first.dtype)
    total = first.to(torch.float32, copy=True)
    for other in others:
        total += other
    return total.to(first.dtype)
