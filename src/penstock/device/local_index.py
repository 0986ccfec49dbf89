"""Device index of a local rank. Does not need torch."""

from __future__ import annotations

from penstock.errors import ConfigError


def local_device_index(
    local_rank: int, num_visible: int, *, ranks_per_replica: int = 1, data_parallel_rank_local: int = 0
) -> int:
    """Index among the visible devices. Raises ConfigError where there are too few.

    local_rank: among the replica's ranks on this machine. ranks_per_replica: tensor times pipeline parallel size.
    data_parallel_rank_local: the replica's number on this machine; replicas take consecutive devices.
    """
    index = data_parallel_rank_local * ranks_per_replica + local_rank
    if index >= num_visible:
        raise ConfigError(
            f"Rank {local_rank} of this machine, of replica {data_parallel_rank_local} with {ranks_per_replica} ranks, "
            f"needs CUDA device {index}, and this process sees {num_visible}. Use fewer ranks, or show it more devices "
            "(CUDA_VISIBLE_DEVICES)."
        )
    return index
