"""Group of ranks with a GPU each, over NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore

from penstock.errors import UnsupportedFeature
from penstock.parallel.connections import RankConnections
from penstock.parallel.torch_group import TorchGroup


class NcclGroup(TorchGroup):
    """Collectives queued on the device's current stream; the host does not wait for them.

    So a rank that is gone or hangs shows as a timeout of the step's result. Plain data goes over `RankConnections`,
    whose errors name the rank. NCCL adds in an order of its own, which is equal in every run with as many ranks, and
    gives all ranks the same bits.
    """

    def __init__(
        self, connections: RankConnections, ranks: Sequence[int], number: int, device: torch.device, timeout_s: float
    ) -> None:
        super().__init__(connections, ranks, number)
        nccl: Any = getattr(distributed, "ProcessGroupNCCL", None)
        if nccl is None:
            raise UnsupportedFeature(
                f"Ranks on {device} exchange tensors by NCCL, without which this torch {torch.__version__} was built. "
                "Install a CUDA build of torch, or use device='cpu'."
            )
        name = f"nccl/{number}/{'-'.join(map(str, ranks))}"
        store = PrefixStore(name, connections.store)
        self._nccl = nccl(store, self.rank, self.size, timedelta(seconds=timeout_s))
        connections.on_close(self._nccl.abort)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        self._nccl.allreduce([tensor]).wait()
        return tensor

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        parts = [part.contiguous() for part in tensor.chunk(self.size, dim)]
        own = torch.empty_like(parts[0])
        self._nccl.reduce_scatter([own], [parts]).wait()
        return own

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._nccl.allgather([gathered], [tensor]).wait()
        return torch.cat(gathered, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        tensor = tensor.contiguous()
        self._nccl.broadcast(tensor, source).wait()
        return tensor

    def send(self, tensor: Tensor, destination: int) -> None:
        self._nccl.send([tensor.contiguous()], destination, 0).wait()

    def start_receiving(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        assert tensor.is_contiguous(), "received in place"
        work = self._nccl.recv([tensor], source, 0)

        def wait() -> Tensor:
            work.wait()
            return tensor

        return wait
