"""Groups of processes that belong to no engine, such as a trainer's and an engine's workers, by vLLM's names.

Both sides of such a group use these classes: the messages are those of torch's gloo (CPU) or NCCL (CUDA).
"""

from __future__ import annotations

import socket as sockets
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, ProcessGroup, Store

from penstock.errors import WeightTransferFailed
from penstock.parallel.connections import (
    JOIN_TIMEOUT_S,
    address_towards,
    gloo_options,
    open_store,
    shortened,
    wait_for_all,
)


@dataclass
class StatelessProcessGroup:
    """Ranks that know each other by a store, apart from torch's default group.

    store: of these ranks alone; rank 0 hosts it. socket: that it listens on, if it was not opened here. address: of
    this machine, for the others. timeout_s: of joining and of each message.
    """

    rank: int
    world_size: int
    store: Store | None
    socket: sockets.socket | None = None
    data_expiration_seconds: int = 3600
    address: str = "127.0.0.1"
    timeout_s: float = JOIN_TIMEOUT_S

    @classmethod
    def create(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: float = JOIN_TIMEOUT_S,
    ) -> StatelessProcessGroup:
        """Join a group, whose rank 0 listens at the port. Raises WaitTimeout where rank 0 or others do not come."""
        store = open_store(host, port, is_host=rank == 0, timeout_s=store_timeout)
        wait_for_all(store, rank, world_size, store_timeout)
        address = address_towards(host, store.port)
        return cls(rank, world_size, store, None, data_expiration_seconds, address, store_timeout)


class PyNcclCommunicator:
    """Collectives of a group: NCCL where each rank has a CUDA device of its own, gloo otherwise.

    group: all of its ranks construct one together. device: where this rank's tensors are.
    """

    def __init__(self, group: StatelessProcessGroup, device: torch.device | str | int) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self._backend: ProcessGroup | None = None
        devices = _exchange(group, _name_of(self.device))
        self._uses_nccl = all(devices) and len(set(devices)) == len(devices)
        self._backend = _connect(group, self.device) if self._uses_nccl else _connect_by_gloo(group)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Copy a contiguous tensor of rank `src` to that of all others. stream: of CUDA, by default the current one.

        Raises WeightTransferFailed where another rank is gone, or nothing arrives within the group's timeout; the group
        is closed then.
        """
        if self._backend is None:
            raise WeightTransferFailed("The group for weights is closed. Open it again (init_weight_transfer_engine).")
        options = distributed.BroadcastOptions()
        options.rootRank = src
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            sent = flat if self._uses_nccl else flat.cpu()
            try:
                self._backend.broadcast([sent], options).wait()
            except RuntimeError as error:
                self.close()
                lost = f"Rank {self.rank} of {self.world_size} lost the others of the group for weights"
                raise WeightTransferFailed(f"{lost}: {shortened(error)}.") from error
            if sent is not flat and src != self.rank:
                flat.copy_(sent)

    def close(self) -> None:
        """Leave the group, which ends the waits of the other ranks for this one."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()


def _name_of(device: torch.device) -> str:
    """Name of a CUDA device that no other has; "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _exchange(group: StatelessProcessGroup, value: str) -> list[str]:
    """Values of all ranks."""
    store = _store_of(group)
    store.set(f"device/{group.rank}", value)
    keys = [f"device/{rank}" for rank in range(group.world_size)]
    store.wait(keys, timedelta(seconds=group.timeout_s))
    return [store.get(key).decode() for key in keys]


def _connect(group: StatelessProcessGroup, device: torch.device) -> Any:
    nccl: Any = distributed.ProcessGroupNCCL
    with torch.cuda.device(device):
        store = PrefixStore("nccl", _store_of(group))
        return nccl(store, group.rank, group.world_size, timedelta(seconds=group.timeout_s))


def _connect_by_gloo(group: StatelessProcessGroup) -> Any:
    options = gloo_options(group.address, group.timeout_s)
    return distributed.ProcessGroupGloo(PrefixStore("gloo", _store_of(group)), group.rank, group.world_size, options)


def _store_of(group: StatelessProcessGroup) -> Store:
    assert group.store is not None, "closed"
    return group.store
