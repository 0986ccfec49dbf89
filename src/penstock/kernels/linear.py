"""Matrix products of hidden states with weights.

Suffixes: T rows (tokens), I input features, O output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.device.stand_in import is_on_cpu
from penstock.kernels.triton import triton_runs

# oneDNN looks its primitive up in every call (about 20 us), which pays for larger weights only.
_MIN_PACKED_ELEMENTS = 256 * 1024
# Batch rows that the packed layout is optimised for; any number works.
_PACKED_ROWS = 32
# Rows of a decode step that a Triton kernel may take.
_MAX_SKINNY_ROWS = 16


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias: [T, O], in the dtype that x and the bias share; a weight of another one is converted."""
    weight_OI = weight_OI.to(x_TI.dtype)
    if x_TI.dim() == 2 and x_TI.shape[0] <= _MAX_SKINNY_ROWS and triton_runs(x_TI):
        from penstock.kernels.triton.linear import choose_tiling, skinny_linear, takes

        tiling = choose_tiling(*x_TI.shape, weight_OI.shape[0])
        if tiling is not None and takes(x_TI, weight_OI, bias_O):
            return skinny_linear(x_TI, weight_OI, bias_O, tiling=tiling)
    return F.linear(x_TI, weight_OI, bias_O)


def batch_invariant_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear` whose rows do not depend on each other, on a GPU too, where it takes longer."""
    if not triton_runs(x_TI):
        return linear(x_TI, weight_OI, bias_O)
    from penstock.kernels.triton.invariant_linear import invariant_linear

    result_TO = invariant_linear(x_TI.flatten(0, -2), weight_OI.to(x_TI.dtype), bias_O)
    return result_TO.view(*x_TI.shape[:-1], -1)


def batch_invariant_head_products(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """Products of each head with its weight, whose rows do not depend on each other: [T, H, O]."""
    if not triton_runs(x_THI):
        return torch.bmm(x_THI.transpose(0, 1), weight_HOI.transpose(1, 2)).transpose(0, 1)
    from penstock.kernels.triton.invariant_linear import invariant_products

    return invariant_products(x_THI, weight_HOI)


def packing_pays(weight_OI: Tensor) -> bool:
    """Whether `packed_linear` beats `linear` for this weight at decode-sized batches.

    On two AVX2 cores in float32, packed products of 2 to 32 rows took 0.25 to 0.9 of the time; below the size limit
    they took longer. One row is about equal.
    """
    return (
        is_on_cpu(weight_OI)
        and weight_OI.dtype == torch.float32
        and weight_OI.numel() >= _MIN_PACKED_ELEMENTS
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack_weight(weight_OI: Tensor) -> Tensor:
    """The weight in oneDNN's blocked layout: an opaque tensor, good for `packed_linear` and `unpack_weight` only."""
    if weight_OI.is_meta:
        return weight_OI.clone()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_ROWS)
    return packed


def unpack_weight(packed_OI: Tensor) -> Tensor:
    """The weight that was packed, bit for bit: [O, I]."""
    return packed_OI.to_dense()


def packed_linear(x_TI: Tensor, packed_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear` with a weight of `pack_weight`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, packed_OI, bias_O, "none", [], "")
    return product
