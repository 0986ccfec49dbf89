"""Unpacking of int4 from 32-bit words, and shape checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import CheckpointError

BITS = 4
PER_WORD = 32 // BITS
IN_ORDER = tuple(range(PER_WORD))


def unpack_columns(words_RC: Tensor, positions: Sequence[int] = IN_ORDER) -> Tensor:
    """Unpack int32 [R, C] to uint8 [R, 8 * C]. positions: position of each integer in a word, from the low bits on."""
    shifts = torch.tensor(positions, dtype=torch.int32, device=words_RC.device) * BITS
    numbers: Tensor = (words_RC.unsqueeze(2) >> shifts) & (2**BITS - 1)
    return numbers.to(torch.uint8).flatten(1)


def unpack_rows(words_RC: Tensor) -> Tensor:
    """Unpack int32 [R, C] to uint8 [8 * R, C]."""
    return unpack_columns(words_RC.t().contiguous()).t().contiguous()


def check_shape(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise CheckpointError unless the tensor has this dtype and shape."""
    if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, but quantization_config means {dtype} {list(shape)}."
        )


def input_order(name: str, group_I: Tensor, group_size: int, num_groups: int, *, is_reordered: bool) -> Tensor | None:
    """Return the inputs by group, from each input's group; None if groups are contiguous.

    is_reordered: whether the checkpoint says that they are not, which is believed on the meta device.
    Raises CheckpointError for a group of a wrong size.
    """
    if group_I.is_meta:
        return torch.argsort(group_I) if is_reordered else None
    group_I = group_I.long()
    sizes = torch.full((num_groups,), group_size, device=group_I.device)
    sizes[-1] = group_I.numel() - group_size * (num_groups - 1)
    is_valid = bool((group_I >= 0).all()) and bool((group_I < num_groups).all())
    if not is_valid or not torch.equal(torch.bincount(group_I, minlength=num_groups), sizes):
        raise CheckpointError(f"{name} does not give {group_size} inputs to each group.")
    if torch.equal(group_I, group_I.sort().values):
        return None
    return torch.argsort(group_I, stable=True)
