"""Tensors that have sizes and no memory, on torch's meta device, in the place of another device's.

What is done with them shows what it would take, and costs nothing. Whoever asks where a tensor is, is told what it
stands for; and the C++ kernels, for which there are no addresses then, are not called (`kernels.native.library`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

META = torch.device("meta")


class _Here(threading.local):
    """kind: of the device whose place this thread's tensors take; None where they are what they are."""

    kind: str | None = None


_here = _Here()


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether this tensor is on the CPU, or stands for one that is."""
    return tensor.is_cpu or _here.kind == "cpu"


def stands_for_cpu() -> bool:
    """Whether the tensors that are made now have no memory, and stand for a CPU's."""
    return _here.kind == "cpu"


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Make all tensors without memory, in this thread, and let them stand for those of a kind of device."""
    before, _here.kind = _here.kind, kind
    try:
        with torch.no_grad(), META, _KnownSizes():
            yield
    finally:
        _here.kind = before


class _KnownSizes(TorchFunctionMode):
    """Runs what torch refuses without values, or does in another way than with them, although its size is known."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _KNOWN_SIZES.get(func, func)(*args, **(kwargs or {}))


def _attended(query: Tensor, _key: Tensor, _value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    """As the CPU does it, with a sum per row, and a mask of numbers; without values torch would keep all scores."""
    beside = [query.new_empty(query.shape[:-1], dtype=torch.float32)]
    if attn_mask is not None:
        beside.append(attn_mask.to(query.dtype))
    return torch.empty_like(query)


def _contains(_tensor: Tensor, _element: object) -> bool:
    """No one number is anywhere: such as the padding, of which Transformers would warn."""
    return False


def _grouped_products(rows_SI: Tensor, weight_EIO: Tensor, *_: Any, **__: Any) -> Tensor:
    """The products of rows that are ordered by expert, each with its expert's weight; torch refuses float32."""
    return rows_SI.new_empty(rows_SI.shape[0], weight_EIO.shape[-1])


_KNOWN_SIZES: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attended,
    Tensor.__contains__: _contains,
    **{
        getattr(module, name): _grouped_products
        for module, name in ((torch, "_grouped_mm"), (F, "grouped_mm"))
        if hasattr(module, name)
    },
}
