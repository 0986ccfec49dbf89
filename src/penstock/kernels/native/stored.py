"""Arguments of calls that are made again and again with the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class StoredArguments:
    """Integers side by side in memory, for a call that takes their address."""

    __slots__ = ("_values", "address")

    def __init__(self, values: Sequence[int]) -> None:
        self._values = np.array(values, dtype=np.int64)
        self.address: int = self._values.ctypes.data
