"""A group whose ranks are processes of any machines, and talk through torch.distributed."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import Work

from penstock.parallel.connections import RankConnections
from penstock.parallel.group import ProcessGroup, add_up

# Numbers from which on each of three or more ranks adds up a share only: it sends less then, but twice.
_LONG = 1 << 14
# What may be on its way to a rank that has not come yet.
_SENT_BYTES, _SENT_MESSAGES = 4 << 20, 256
# Of a tag's 31 bits: the group, whether it is one rank's message to another, the call's number, and a checksum.
_CALL_BITS, _SUM_BITS = 12, 16


class TorchGroup(ProcessGroup):
    """ranks: of all that are connected, those of the group, in its order. number: of the group among this rank's, < 4.

    Ranks send to each other directly, so that whoever does not come is known, and add up in their order, so that
    sums have the bits of `SharedMemoryGroup`'s. Raises what `RankConnections` raises.
    """

    # What goes to another machine shares its connection with what the others send.
    sends_parts = True

    def __init__(self, connections: RankConnections, ranks: Sequence[int], number: int) -> None:
        self.rank, self.size = ranks.index(connections.rank), len(ranks)
        self._connections = connections
        self._ranks = tuple(ranks)
        self._number = number
        self._num_calls = 0
        # By the places of who sends and who receives.
        self._num_sent: Counter[tuple[int, int]] = Counter()
        self._on_its_way: dict[int, deque[tuple[Tensor, Work | None]]] = {}

    def note_step(self, step_id: int) -> None:
        self._connections.step_id = step_id

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        if self.size == 2 or tensor.numel() < _LONG:
            return add_up(self._gather("all_reduce", tensor))
        padded = F.pad(tensor.view(-1), (0, -tensor.numel() % self.size))
        share = add_up(self._swap("all_reduce", list(padded.view(self.size, -1))))
        whole = torch.cat(self._gather("all_reduce", share))
        return whole[: tensor.numel()].view(tensor.shape)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return add_up(self._swap("reduce_scatter", [part.contiguous() for part in tensor.chunk(self.size, dim)]))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._gather("all_gather", tensor.contiguous()), dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        tensor = tensor.contiguous()
        if self.rank == source:
            self._exchange("broadcast", dict.fromkeys(self._others(), tensor), {}, tensor)
        else:
            self._exchange("broadcast", {}, {source: tensor}, tensor)
        return tensor

    def send(self, tensor: Tensor, destination: int) -> None:
        call, tag = self._message(tensor, self.rank, destination)
        # gloo sends nothing before the other asks for it.
        copy = tensor.contiguous().clone()
        waiting = self._on_its_way.setdefault(destination, deque())
        rank = self._ranks[destination]
        waiting.append((copy, self._connections.start_sending(call, tag, copy, rank)))
        while len(waiting) > _SENT_MESSAGES or sum(sent.nbytes for sent, _ in waiting) > _SENT_BYTES:
            self._connections.finish(call, waiting.popleft()[1], rank)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        return self.start_receiving(tensor, source)()

    def start_receiving(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        assert tensor.is_contiguous(), "it is filled as it lies"
        call, tag = self._message(tensor, source, self.rank)
        rank = self._ranks[source]
        work = self._connections.start_receiving(call, tag, tensor, rank)

        def wait() -> Tensor:
            self._connections.finish(call, work, rank)
            return tensor

        return wait

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self._gather("gather_values", given)]

    def _gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors, this one's among them."""
        return self._swap(name, [tensor] * self.size)

    def _swap(self, name: str, given: list[Tensor]) -> list[Tensor]:
        """By rank what it gives to this one, of tensors for each."""
        received = list(map(torch.empty_like, given))
        received[self.rank] = given[self.rank]
        others = self._others()
        self._exchange(name, {place: given[place] for place in others}, {p: received[p] for p in others}, given[0])
        return received

    def _exchange(self, name: str, given: dict[int, Tensor], received: dict[int, Tensor], like: Tensor) -> None:
        """By place. like: a tensor as each of those."""
        self._num_calls += 1
        call = f"{name} (call {self._num_calls} of its group of {self.size})"
        tag = self._tag(name, is_message=False, number=self._num_calls, tensor=like)
        self._connections.exchange(call, tag, self._by_rank(given), self._by_rank(received))

    def _message(self, tensor: Tensor, source: int, destination: int) -> tuple[str, int]:
        """How a message is called by this rank, and its tag."""
        self._num_sent[source, destination] += 1
        number = self._num_sent[source, destination]
        other = self._ranks[destination if source == self.rank else source]
        call = f"send to rank {other}" if source == self.rank else f"receive from rank {other}"
        call = f"{call} (message {number} of its group of {self.size})"
        return call, self._tag("message", is_message=True, number=number, tensor=tensor)

    def _tag(self, name: str, *, is_message: bool, number: int, tensor: Tensor) -> int:
        """What differs in anything does not come together, and is missed instead."""
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tensor.numel()}".encode()) % (1 << _SUM_BITS)
        place = (self._number << 1 | is_message) << _CALL_BITS | number % (1 << _CALL_BITS)
        return place << _SUM_BITS | checksum

    def _others(self) -> list[int]:
        return [place for place in range(self.size) if place != self.rank]

    def _by_rank(self, by_place: dict[int, Tensor]) -> dict[int, Tensor]:
        return {self._ranks[place]: tensor for place, tensor in by_place.items()}
