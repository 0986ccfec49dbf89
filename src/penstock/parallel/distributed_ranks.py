"""Ranks that are processes of any machines."""

from __future__ import annotations

from penstock.config.parallel import ParallelConfig
from penstock.parallel.connections import RankConnections
from penstock.parallel.context import ParallelContext
from penstock.parallel.local_ranks import KINDS, place_rank
from penstock.parallel.torch_group import TorchGroup


def join_connected_ranks(connections: RankConnections, config: ParallelConfig) -> ParallelContext:
    """This process's place among all ranks, whose connections the caller closes."""
    return place_rank(connections.rank, config, lambda kind, ranks: TorchGroup(connections, ranks, KINDS.index(kind)))
