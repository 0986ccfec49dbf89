"""Embedding lookup. Suffixes: V rows of the table, D row size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.device.stand_in import is_on_cpu
from penstock.kernels.native import NATIVE, WEIGHT_TYPES
from penstock.kernels.native.operations import ids_of_share


def embedding(ids: Tensor, table_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """table[ids] in `dtype`: [..., D] for int32 or int64 ids of any shape.

    Raises IndexError for an id out of range (on the CPU).
    """
    # For one-token steps the overhead of torch's operator is several times the cost of all norms of the layers.
    if NATIVE is not None and dtype is torch.float32 and is_on_cpu(ids) and native_takes(table_VD):
        return NATIVE.lookup(ids, table_VD)
    return F.embedding(ids, table_VD).to(dtype)


def rows_of_share(ids_T: Tensor, start: int, size: int, whole: int, look_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Look up a rank's shard of rows, `size` of `whole` from `start` on; zeros for other ids: [T, D].

    look_up: takes ids relative to the shard.
    """
    local_T, is_here_T = ids_of_share(ids_T, start, size, whole)
    rows_TD = look_up(local_T)
    return rows_TD if is_here_T is None else torch.where(is_here_T.unsqueeze(-1), rows_TD, 0)


def native_takes(table_VD: Tensor) -> bool:
    """Whether the C++ kernels can read rows of this table."""
    return is_on_cpu(table_VD) and table_VD.dtype in WEIGHT_TYPES and table_VD.is_contiguous()
