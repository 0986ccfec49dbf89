"""Shapes of operator results on torch's meta device.

Torch infers most of them. This module handles operators that torch rejects or runs differently without values, and
those of native models and the sampler for which torch would import its compiler and sympy, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

META = torch.device("meta")


class KnownSizes(TorchFunctionMode):
    """Overrides at the level of torch functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        known = _KNOWN_SIZES.get(func)
        if known is None or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        return known(*args, **(kwargs or {}))


class SizesOfOperators(TorchDispatchMode):
    """Overrides at the level of operators (aten)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in `TensorMemory`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func.overloadpacket is _aten.arange and given.get("device") == META:
            return torch.empty_like(func(*args, **{**given, "device": "cpu"}), device=META)
        if not any(tensor.is_meta for tensor in _tensors(args, given)):
            return func(*args, **given)  # real tensors
        if func._schema.is_mutable and len(func._schema.returns) == 1 and torch.Tag.inplace_view not in func.tags:
            return given.get("out", args[0])  # in place: no new tensor
        if torch.Tag.pointwise in func.tags and "memory_format" not in given:
            return _made(func, args, given, _broadcast)
        if func in _SHAPES:
            return _made(func, args, given, _SHAPES[func])
        return func(*args, **given)


def _made(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], shape_of: Callable[..., Sequence[int]]
) -> Any:
    """Make a result of this shape; its dtype is inferred from scalars."""
    one = func(*tree_map(_one_of, args), **tree_map(_one_of, kwargs))
    if not isinstance(one, Tensor):
        return func(*args, **kwargs)
    shape = shape_of(*args, **kwargs)
    like = next((operand for operand in _tensors(args, kwargs) if operand.shape == shape), None)
    if like is None or like.is_contiguous() or "memory_format" in kwargs or not _is_dense(like):
        return torch.empty(shape, dtype=one.dtype, device=META)
    return torch.empty_strided(shape, like.stride(), dtype=one.dtype, device=META)


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Iterate over the tensors among an operator's arguments, which are tensors, lists of them, and other values."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _is_dense(x: Tensor) -> bool:
    """Whether the elements are contiguous in some order of dimensions."""
    strides = x.stride()
    return x.permute(sorted(range(x.dim()), key=lambda dim: -strides[dim])).is_contiguous()


def _one_of(value: Any) -> Any:
    return torch.ones([1] * value.dim(), dtype=value.dtype, device="cpu") if isinstance(value, Tensor) else value


def _broadcast(*args: Any, **kwargs: Any) -> Sequence[int]:
    # torch.broadcast_shapes imports what is to be avoided.
    return torch.Size(np.broadcast_shapes(*(tuple(tensor.shape) for tensor in _tensors(args, kwargs))))


def _of_first(x: Tensor, *_: Any, **__: Any) -> Sequence[int]:
    return x.shape


def _of_second(_: Tensor, x: Tensor, **__: Any) -> Sequence[int]:
    return x.shape


def _reduced(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, **_: Any) -> Sequence[int]:
    # None and an empty list mean all dimensions.
    dims = {one % x.dim() for one in ([dim] if isinstance(dim, int) else dim or range(x.dim()))}
    sizes = [1 if place in dims else size for place, size in enumerate(x.shape)]
    return torch.Size(size for place, size in enumerate(sizes) if keepdim or place not in dims)


def _concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Sequence[int]:
    sizes = list(tensors[0].shape)
    sizes[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return torch.Size(sizes)


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Sequence[int]:
    sizes = list(tensors[0].shape)
    sizes.insert(dim % (len(sizes) + 1), len(tensors))
    return torch.Size(sizes)


def _product(left: Tensor, right: Tensor) -> Sequence[int]:
    return torch.Size([*left.shape[:-1], right.shape[-1]])


def _sum_with_product(_bias: Tensor, left: Tensor, right: Tensor, **_: Any) -> Sequence[int]:
    return _product(left, right)


_aten = torch.ops.aten
_SHAPES: dict[Any, Callable[..., Sequence[int]]] = {
    **dict.fromkeys(
        (_aten.amax.default, _aten.amin.default, _aten.sum.dim_IntList, _aten.mean.dim, _aten.logsumexp.default),
        _reduced,
    ),
    **dict.fromkeys((_aten._softmax.default, _aten.cumsum.default, _aten.flip.default), _of_first),
    **dict.fromkeys((_aten.empty_like.default, _aten.zeros_like.default, _aten.full_like.default), _of_first),
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default), _product),
    _aten.addmm.default: _sum_with_product,
    _aten.cat.default: _concatenated,
    _aten.stack.default: _stacked,
    _aten.searchsorted.Tensor: _of_second,
}


def _attended(query: Tensor, *given: Any, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Attention like the CPU's, with a log-sum-exp per row; torch's meta version would allocate all scores."""
    mask = given[2] if len(given) > 2 else attn_mask
    beside = [query.new_empty(query.shape[:-1], dtype=torch.float32)]
    if mask is not None:
        beside.append(mask.to(query.dtype))
    return torch.empty_like(query)


def _contains(_tensor: Tensor, _element: object) -> bool:
    """Return False: no token id is in a meta tensor, such as the padding that Transformers would warn of."""
    return False


def _grouped_products(rows_SI: Tensor, weight_EIO: Tensor, *_: Any, **__: Any) -> Tensor:
    """Grouped matrix product of rows sorted by expert; torch rejects float32."""
    return rows_SI.new_empty(rows_SI.shape[0], weight_EIO.shape[-1])


def _largest(x: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> torch.return_types.topk:
    shape = list(x.shape)
    shape[dim] = k
    return torch.return_types.topk((x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)))


def _sorted(x: Tensor, *_: Any, **__: Any) -> torch.return_types.sort:
    return torch.return_types.sort((x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)))


def _gathered(x: Tensor, *dim_and_index: Any, index: Tensor | None = None, **_: Any) -> Tensor:
    return x.new_empty((dim_and_index[1] if index is None else index).shape)


def _looked_up(indices: Tensor, table: Tensor, *_: Any, **__: Any) -> Tensor:
    return table.new_empty([*indices.shape, table.shape[-1]])


def _layer_norm(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


_KNOWN_SIZES: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attended,
    Tensor.__contains__: _contains,
    Tensor.gather: _gathered,
    Tensor.topk: _largest,
    Tensor.sort: _sorted,
    F.layer_norm: _layer_norm,
    F.embedding: _looked_up,
    **{
        getattr(module, name): _grouped_products
        for module, name in ((torch, "_grouped_mm"), (F, "grouped_mm"))
        if hasattr(module, name)
    },
}
