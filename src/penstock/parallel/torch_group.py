"""Group of processes on several machines, over gloo point-to-point messages."""

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

# Elements from which an all-reduce of three or more ranks is a reduce-scatter and an all-gather.
_LONG = 1 << 14
# Limits of unreceived messages per destination.
_SENT_BYTES, _SENT_MESSAGES = 4 << 20, 256
# Fields of a 31-bit tag: group, point-to-point or collective, call number, and a checksum.
_CALL_BITS, _SUM_BITS = 12, 16


class TorchGroup(ProcessGroup):
    """Collectives over `RankConnections`, whose errors they raise.

    ranks: world ranks of the group, in order. number: the group's number among those of this rank, < 4.

    Ranks exchange tensors directly, so that an error can name the missing rank, and add in rank order, so that sums
    have the bits of `SharedMemoryGroup`.
    """

    # Ranks of a machine share its network connection.
    sends_parts = True

    def __init__(self, connections: RankConnections, ranks: Sequence[int], number: int) -> None:
        self.rank, self.size = ranks.index(connections.rank), len(ranks)
        self._connections = connections
        self._ranks = tuple(ranks)
        self._number = number
        self._num_calls = 0
        # Messages by (sender, receiver), as ranks of the group.
        self._num_sent: Counter[tuple[int, int]] = Counter()
        self._in_flight: dict[int, deque[tuple[Tensor, Work | None]]] = {}

    def note_step(self, step_id: int) -> None:
        self._connections.step_id = step_id

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        if self.size == 2 or tensor.numel() < _LONG:
            return add_up(self._gather("all_reduce", tensor))
        padded = F.pad(tensor.view(-1), (0, -tensor.numel() % self.size))
        share = add_up(self._all_to_all("all_reduce", list(padded.view(self.size, -1))))
        whole = torch.cat(self._gather("all_reduce", share))
        return whole[: tensor.numel()].view(tensor.shape)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return add_up(self._all_to_all("reduce_scatter", [part.contiguous() for part in tensor.chunk(self.size, dim)]))

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
        # gloo sends nothing before the receiver asks for it.
        copy = tensor.contiguous().clone()
        waiting = self._in_flight.setdefault(destination, deque())
        rank = self._ranks[destination]
        waiting.append((copy, self._connections.start_sending(call, tag, copy, rank)))
        while len(waiting) > _SENT_MESSAGES or sum(sent.nbytes for sent, _ in waiting) > _SENT_BYTES:
            self._connections.finish(call, waiting.popleft()[1], rank)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        return self.start_receiving(tensor, source)()

    def start_receiving(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        assert tensor.is_contiguous(), "received in place"
        call, tag = self._message(tensor, source, self.rank)
        rank = self._ranks[source]
        work = self._connections.start_receiving(call, tag, tensor, rank)

        def wait() -> Tensor:
            self._connections.finish(call, work, rank)
            return tensor

        return wait

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self._gather("gather_values", own)]

    def _gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank."""
        return self._all_to_all(name, [tensor] * self.size)

    def _all_to_all(self, name: str, sent: list[Tensor]) -> list[Tensor]:
        """Send each rank its tensor; return the tensors that the ranks sent to this one."""
        received = list(map(torch.empty_like, sent))
        received[self.rank] = sent[self.rank]
        others = self._others()
        self._exchange(name, {rank: sent[rank] for rank in others}, {rank: received[rank] for rank in others}, sent[0])
        return received

    def _exchange(self, name: str, sent: dict[int, Tensor], received: dict[int, Tensor], like: Tensor) -> None:
        """Exchange tensors, by rank of the group. like: a tensor of their shape and dtype."""
        self._num_calls += 1
        call = f"{name} (call {self._num_calls} of its group of {self.size})"
        tag = self._tag(name, is_message=False, number=self._num_calls, tensor=like)
        self._connections.exchange(call, tag, self._by_world_rank(sent), self._by_world_rank(received))

    def _message(self, tensor: Tensor, source: int, destination: int) -> tuple[str, int]:
        """Return this rank's name of a message, for errors, and its tag."""
        self._num_sent[source, destination] += 1
        number = self._num_sent[source, destination]
        other = self._ranks[destination if source == self.rank else source]
        call = f"send to rank {other}" if source == self.rank else f"receive from rank {other}"
        call = f"{call} (message {number} of its group of {self.size})"
        return call, self._tag("message", is_message=True, number=number, tensor=tensor)

    def _tag(self, name: str, *, is_message: bool, number: int, tensor: Tensor) -> int:
        """Return a tag with a checksum of the call, so that differing calls time out instead of mixing up tensors."""
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tensor.numel()}".encode()) % (1 << _SUM_BITS)
        place = (self._number << 1 | is_message) << _CALL_BITS | number % (1 << _CALL_BITS)
        return place << _SUM_BITS | checksum

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _by_world_rank(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        return {self._ranks[rank]: tensor for rank, tensor in tensors.items()}
