"""Operations of the C++ library as Python calls, generated from the library's own descriptions.

A call with tensors runs an operation; a call with traced tensors records it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native.operation_types import OperationType, Use
from penstock.kernels.native.tracing import TracedTensor


def row_width(x: Tensor) -> int:
    """Elements of a row of [T, width]; for traced tensors too, which have no shape."""
    return x.stride(0) if type(x) is TracedTensor else x.shape[1]


def can_be_added(x: Tensor, residual: Tensor) -> bool:
    """Whether an operation can read `residual` beside the contiguous rows `x`: same dtype and shape, contiguous."""
    if residual.dtype is not x.dtype or not residual.is_contiguous():
        return False
    if type(x) is TracedTensor or type(residual) is TracedTensor:
        return type(x) is type(residual) and x.dim() == residual.dim() and x.stride(0) == residual.stride(0)
    return x.shape == residual.shape


def ids_of_share(ids_T: Tensor, start: int, size: int, whole: int) -> tuple[Tensor, Tensor | None]:
    """Ids relative to a shard of rows, `size` of `whole` from `start` on, and whether each is one of them.

    None in place of the latter where the lookup itself makes the rows of other shards zero.
    """
    if type(ids_T) is TracedTensor:
        return ids_T.origin.share_of(ids_T, start, size, whole), None
    local_T = ids_T - start
    is_here_T = (local_T >= 0) & (local_T < size)
    return torch.where(is_here_T, local_T, 0), is_here_T


def _row_stride(x: Tensor) -> int:
    """Elements from one row to the next; the width for contiguous rows and for a single one."""
    return x.stride(0) if x.shape[0] != 1 else x.shape[-1]


class NativeOperation:
    """An operation for one instruction set. Tensors are float32 with contiguous rows, on the CPU.

    run: the library's function; does nothing for meta tensors.
    """

    def __init__(self, run: Callable[..., int], instruction_set: int, type_: OperationType) -> None:
        self.type = type_
        self.instruction_set = instruction_set
        self._run = partial(run, type_.number, instruction_set)
        self._has_second = type_.second is not Use.NONE

    def rows(self, x: Tensor, width: int, *arguments: Any, second: Tensor | None = None) -> Tensor:
        """Compute new rows from rows: [T, width]. second: the second operand, of an operation that has one."""
        if type(x) is TracedTensor:
            return x.origin.add(self, x, width, arguments, second)
        num_rows = x.shape[0]
        out, threads = torch.empty(num_rows, width), torch.get_num_threads()
        if self._has_second:
            if second is not None and second.shape[0] != num_rows:
                raise ValueError(f"{self.type.name}: {num_rows} rows, and {second.shape[0]} of the second operand.")
            second_stride = 0 if second is None else _row_stride(second)
            self._run(num_rows, threads, x, _row_stride(x), second, second_stride, out, width, *arguments)
        else:
            self._run(num_rows, threads, x, _row_stride(x), out, width, *arguments)
        return out

    def look_up(self, ids_T: Tensor, width: int, *arguments: Any) -> Tensor:
        """Look up rows of a table: [T, width]. Raises IndexError for a row out of range.

        ids_T: int32, contiguous; flattened.
        """
        if type(ids_T) is TracedTensor:
            return ids_T.origin.look_up(self, ids_T, width, arguments)
        num_rows = ids_T.numel()
        out = torch.empty(num_rows, width)
        self._run(num_rows, torch.get_num_threads(), out, width, ids_T, 0, 0, 0, *arguments)
        return out

    def add_to(self, out: Tensor, x: Tensor, ids_T: Tensor, *arguments: Any) -> Tensor:
        """Change rows in place by other rows and an id of each, int32 and contiguous; returns `out`."""
        if type(x) is TracedTensor:
            return x.origin.add_to(self, out, x, ids_T, arguments)
        strides = _row_stride(x), _row_stride(out)
        self._run(x.shape[0], torch.get_num_threads(), x, strides[0], out, strides[1], ids_T, *arguments)
        return out

    def choose(self, x: Tensor, *arguments: Any, with_largest: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose a token for each row, int64 [T], and whether the row has none, bool [T]; optionally its value.

        The value is float32 [T]: the maximum of the row.
        """
        if type(x) is TracedTensor:
            return x.origin.choose(self, x, arguments, with_largest=with_largest)
        num_rows = x.shape[0]
        index_T, failed_T = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
        largest_T = torch.empty(num_rows) if with_largest else None
        threads = torch.get_num_threads()
        self._run(num_rows, threads, x, _row_stride(x), largest_T, 1, index_T, failed_T, *arguments)
        return index_T, failed_T, largest_T
