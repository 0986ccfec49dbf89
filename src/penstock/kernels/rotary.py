"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), in the half-split ("neox") layout.

Suffixes: T tokens, H heads, D head size, R rotated dimensions (R <= D), P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.native import NATIVE
from penstock.kernels.triton import triton_runs


@dataclass(frozen=True, slots=True)
class GatheredRotation:
    """cos: [T, 1, 1, R / 2]. sin: [T, 1, 2, R / 2], negated for the first half."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class TableRotation:
    """The table, and each token's row of it (int64), for a kernel with its own lookup."""

    table_PR: Tensor
    positions_T: Tensor


# Rotation of a step's heads; built once per step, shared by all layers.
Rotation = GatheredRotation | TableRotation


def rotary_table(inv_freq: Tensor, num_positions: int, attention_scaling: float) -> Tensor:
    """Build the table: cosines of each position's R / 2 angles, then sines, times `attention_scaling`: float32 [P, R].

    inv_freq: float32 [R / 2], radians per position.
    """
    positions_P = torch.arange(num_positions, dtype=torch.float32, device=inv_freq.device)
    angles_PR = torch.outer(positions_P, inv_freq)
    return torch.cat((angles_PR.cos(), angles_PR.sin()), dim=-1).mul_(attention_scaling)


def gather_rotation(table_PR: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
    """Gather the rows of `rotary_table` at these positions (int64 or int32, each in [0, P)), in the heads' dtype."""
    if _native_rotates(table_PR, dtype) or triton_runs(table_PR):
        return TableRotation(table_PR, positions_T.to(torch.int64))
    return gather_rotation_reference(table_PR, positions_T, dtype)


def gather_rotation_reference(table_PR: Tensor, positions_T: Tensor, dtype: torch.dtype) -> GatheredRotation:
    """The specification of `gather_rotation`, for the rotation in plain torch."""
    rows_TR = table_PR.index_select(0, positions_T).to(dtype)
    cos, sin = rows_TR.chunk(2, -1)
    return GatheredRotation(cos=cos[:, None, None, :], sin=torch.stack((-sin, sin), dim=1)[:, None])


def no_rotation(table_P0: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Rotation | None:
    """Rotation of no dimension, for fused kernels that look up rows of a table; None without one.

    table_P0: an empty table, on the device.
    """
    return TableRotation(table_P0, positions_T) if _native_rotates(table_P0, dtype) else None


def apply_rotary(heads_THD: Tensor, rotation: Rotation) -> None:
    """Rotate the first R dimensions of every head in place: (a, b) becomes (a cos - b sin, b cos + a sin).

    heads_THD: [T, H, D], the last dimension contiguous. Query and key heads in one tensor are rotated faster in one
    call.
    """
    if isinstance(rotation, TableRotation):
        if NATIVE is not None and _native_rotates(rotation.table_PR, heads_THD.dtype):
            NATIVE.apply_rotary(heads_THD, rotation.table_PR, rotation.positions_T)
        else:
            from penstock.kernels.triton import rotary

            rotary.apply_rotary(heads_THD, rotation.table_PR, rotation.positions_T)
        return
    half = rotation.cos.shape[-1]
    pairs = heads_THD[..., : 2 * half].unflatten(-1, (2, half))
    partners = pairs.flip(2)
    pairs.mul_(rotation.cos).addcmul_(partners, rotation.sin)


def _native_rotates(table_PR: Tensor, dtype: torch.dtype) -> bool:
    """Whether the C++ kernels rotate heads of this dtype."""
    return NATIVE is not None and NATIVE.runs(table_PR) and dtype is torch.float32
