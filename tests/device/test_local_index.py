"""Every rank of a machine has a device of its own."""

from __future__ import annotations

import pytest
import torch

from penstock.config import DeviceConfig
from penstock.device.select import gpu_of_rank
from penstock.errors import ConfigError


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def test_ranks_have_devices_one_after_another() -> None:
    found = [gpu_of_rank(DeviceConfig(device="cuda"), rank, 4) for rank in range(4)]
    assert found == [torch.device("cuda", rank) for rank in range(4)]


def test_too_few_devices_are_told() -> None:
    with pytest.raises(ConfigError, match="Rank 4 of the 6 .* needs CUDA device 4, and this process sees 4"):
        gpu_of_rank(DeviceConfig(device="cuda"), 4, 6)
