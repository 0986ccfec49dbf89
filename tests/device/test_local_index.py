"""Every rank of a machine has a device of its own."""

from __future__ import annotations

import pytest

from penstock.device.select import local_device_index
from penstock.errors import ConfigError


def test_ranks_of_replicas_have_devices_one_after_another() -> None:
    indices = [
        local_device_index(rank, 8, ranks_per_replica=4, data_parallel_rank_local=replica)
        for replica in range(2)
        for rank in range(4)
    ]
    assert indices == list(range(8))


@pytest.mark.parametrize(("rank", "replica", "visible"), [(2, 0, 2), (0, 1, 2), (0, 0, 0)])
def test_too_few_devices_are_told(rank: int, replica: int, visible: int) -> None:
    with pytest.raises(ConfigError, match=rf"needs CUDA device {rank + 2 * replica}, and this process sees {visible}"):
        local_device_index(rank, visible, ranks_per_replica=2, data_parallel_rank_local=replica)
