"""Group of processes on one machine, over shared memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.errors import UnsupportedFeature
from penstock.kernels.native import collectives_library
from penstock.kernels.native.collectives import Channels, CollectiveKind, Collectives
from penstock.kernels.native.library import Library
from penstock.parallel.group import ProcessGroup, add_up
from penstock.parallel.shared_memory import SharedMemory

# Bytes per rank and piece of a collective: the pieces of all ranks should stay in a core's own cache.
SLOT_BYTES = 256 << 10
# Timeout of a collective.
GROUP_TIMEOUT_S = 240.0
# Spinning before a waiting rank sleeps, where each rank has its own core: longer than the usual skew of ranks.
SPIN_US = 20


class SharedMemoryGroup(ProcessGroup):
    """Collectives in `group_bytes` of `memory` from `start` on. rank, size: rank in the group, and its size.

    Calls are compared among ranks: differing calls raise RanksDisagree, with the rank. A missing rank raises
    WaitTimeout after `timeout_s`, with the rank and the call. The group is unusable after either.
    """

    collectives: Collectives

    def __init__(
        self,
        rank: int,
        size: int,
        memory: SharedMemory,
        *,
        start: int = 0,
        timeout_s: float = GROUP_TIMEOUT_S,
        spin_us: int = SPIN_US,
    ) -> None:
        self.rank, self.size = rank, size
        self._memory = memory
        library, address = _library(), memory.address + start
        self.collectives = Collectives(
            library, address, rank, size, slot_bytes=SLOT_BYTES, timeout_s=timeout_s, spin_us=spin_us
        )
        first_channel = address + int(library.collective_bytes(size, SLOT_BYTES))
        self._channels = Channels(library, first_channel, rank, size, timeout_s=timeout_s, spin_us=spin_us)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32:
            return add_up(self.all_gather(tensor.unsqueeze(0), 0).unbind())
        return self.collectives.all_reduce(tensor if tensor.is_contiguous() else tensor.contiguous())

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        dim %= tensor.dim()
        size = tensor.shape[dim] // self.size
        if tensor.dtype is not torch.float32:
            return add_up(self.all_gather(tensor.unsqueeze(0), 0).narrow(1 + dim, self.rank * size, size).unbind())
        share = tensor.new_empty([*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]])
        self._run("reduce_scatter", CollectiveKind.SUM_SCATTERED, tensor, dim, share)
        return share

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        dim %= tensor.dim()
        gathered = tensor.new_empty([*tensor.shape[:dim], tensor.shape[dim] * self.size, *tensor.shape[dim + 1 :]])
        self._run("all_gather", CollectiveKind.GATHER, tensor, dim, gathered)
        return gathered

    def _run(self, name: str, kind: CollectiveKind, tensor: Tensor, dim: int, result: Tensor) -> None:
        """Run a collective with shares side by side along this dimension."""
        self.collectives.run(name, kind, tensor.contiguous(), max(1, math.prod(tensor.shape[:dim])), result)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        tensor = tensor.contiguous()
        self.collectives.run("broadcast", CollectiveKind.BROADCAST + source, tensor, 1, tensor)
        return tensor

    def send(self, tensor: Tensor, destination: int) -> None:
        self._channels.send(tensor.contiguous(), destination)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        assert tensor.is_contiguous(), "received in place"
        self._channels.receive(tensor, source)
        return tensor

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = torch.empty(self.size, len(data), dtype=torch.uint8)
        self.collectives.run("gather_values", CollectiveKind.GATHER, own, 1, gathered)
        return [row.numpy().tobytes() for row in gathered]


def group_bytes(size: int) -> int:
    """Return the shared memory of a group in bytes. Raises UnsupportedFeature without the C++ kernels."""
    library = _library()
    return int(library.collective_bytes(size, SLOT_BYTES)) + size * size * int(library.channel_bytes())


def calls_of_ranks(address: int, size: int) -> list[int]:
    """Return how many calls each rank of a group has begun, read from the group's memory by any process."""
    library = _library()
    return [int(library.collective_calls(address, rank)) for rank in range(size)]


def waits_in_channels(address: int, size: int) -> list[tuple[int, int]]:
    """Return (waiting rank, awaited rank) of all point-to-point channels, read by any process."""
    library = _library()
    first, channel_bytes = address + int(library.collective_bytes(size, SLOT_BYTES)), int(library.channel_bytes())
    waits = []
    for number in range(size * size):
        source, destination = divmod(number, size)
        side = int(library.channel_waits(first + number * channel_bytes))
        if side:
            waits.append((destination, source) if side == 1 else (source, destination))
    return waits


def _library() -> Library:
    library = collectives_library()
    if library is None:
        raise UnsupportedFeature(
            "Several ranks on a CPU exchange tensors in shared memory through Penstock's C++ kernels, which were not "
            "built with this installation. Reinstall Penstock with a C++ compiler, or use tensor_parallel_size=1."
        )
    return library
