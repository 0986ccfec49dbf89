"""Rows of a table, such as tokens' embeddings. Suffixes: V rows of the table, D row size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.device.stand_in import is_on_cpu
from penstock.kernels.native import NATIVE, WEIGHT_TYPES
from penstock.kernels.native.tracing import share_of_input


def embedding(ids: Tensor, table_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """table[ids] in `dtype`: [..., D] for int32 or int64 ids of any shape.

    Raises IndexError for a row that is not there (on the CPU).
    """
    # Where a step is one token, torch's operator takes several times as long as all rows of the layers' norms.
    if NATIVE is not None and dtype is torch.float32 and is_on_cpu(ids) and native_takes(table_VD):
        return NATIVE.lookup(ids, table_VD)
    return F.embedding(ids, table_VD).to(dtype)


def rows_of_share(ids_T: Tensor, start: int, size: int, whole: int, look_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of the ids from `start` on, `size` of `whole`, which `look_up` finds by their place among these; zeros for
    other ids: [T, D].
    """
    share_T = share_of_input(ids_T, start, size, whole)
    if share_T is not None:
        return look_up(share_T)
    local_T = ids_T - start
    is_here_T = (local_T >= 0) & (local_T < size)
    rows_TD = look_up(torch.where(is_here_T, local_T, 0))
    return torch.where(is_here_T.unsqueeze(-1), rows_TD, 0)


def native_takes(table_VD: Tensor) -> bool:
    """Whether the C++ kernels can read rows of this table."""
    return is_on_cpu(table_VD) and table_VD.dtype in WEIGHT_TYPES and table_VD.is_contiguous()
