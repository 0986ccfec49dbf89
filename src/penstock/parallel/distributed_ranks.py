"""Groups of ranks on several machines."""

from __future__ import annotations

import torch

from penstock.config.parallel import ParallelConfig
from penstock.parallel.connections import RankConnections
from penstock.parallel.local_ranks import KINDS, Kind, place_rank
from penstock.parallel.nccl_group import NcclGroup
from penstock.parallel.state import ParallelState
from penstock.parallel.torch_group import TorchGroup


def join_connected_ranks(
    connections: RankConnections, config: ParallelConfig, device: torch.device | None = None
) -> ParallelState:
    """Join all groups of this rank. The caller closes the connections. device: the rank's GPU, if it has one.

    Raises UnsupportedFeature for a GPU and a torch without NCCL.
    """

    def join(kind: Kind, ranks: tuple[int, ...]) -> TorchGroup:
        number = KINDS.index(kind)
        if device is None:
            return TorchGroup(connections, ranks, number)
        return NcclGroup(connections, ranks, number, device, config.step_timeout_s)

    return place_rank(connections.rank, config, join)
