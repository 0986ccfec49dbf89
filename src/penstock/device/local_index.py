"""Which of a machine's devices a rank has. Needs no torch."""

from __future__ import annotations

from penstock.errors import ConfigError


def local_device_index(
    local_rank: int, num_visible: int, *, ranks_per_replica: int = 1, data_parallel_rank_local: int = 0
) -> int:
    """Of the devices that this process sees. Raises ConfigError where there are too few.

    local_rank: among those of the replica on this machine. ranks_per_replica: tensor times pipeline parallel size.
    data_parallel_rank_local: of the replica among those of the machine, which take their devices one after another.
    """
    index = data_parallel_rank_local * ranks_per_replica + local_rank
    if index >= num_visible:
        raise ConfigError(
            f"Rank {local_rank} of this machine, of replica {data_parallel_rank_local} with {ranks_per_replica} ranks, "
            f"needs CUDA device {index}, and this process sees {num_visible}. Use fewer ranks, or show it more devices "
            "(CUDA_VISIBLE_DEVICES)."
        )
    return index
