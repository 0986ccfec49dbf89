"""CPU device that counts copies to the device, which cost host time on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock.device.base import CellWrites, Device
from penstock.device.cpu import CpuDevice


class CountingDevice(CpuDevice):
    """Counts the uploads of an asynchronous device. num_uploads: so far."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.num_uploads = 0

    def upload(self, array: np.ndarray) -> Tensor:
        self.num_uploads += 1
        return super().upload(array)

    def scatter(self, writes: Sequence[CellWrites]) -> None:
        Device.scatter(self, writes)
