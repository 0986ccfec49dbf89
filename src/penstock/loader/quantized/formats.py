"""Checkpoint formats: from the tensors of a quantised linear layer to its integers and grid.

Suffixes: O output features, I input features, G groups of input features, W words of eight 4-bit integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.checkpoints.quantized_checkpoint import (
    AWQ,
    GPTQ,
    GPTQ_V2,
    INT_QUANTIZED,
    TORCHAO,
    QuantizedCheckpoint,
)
from penstock.errors import CheckpointError, UnsupportedFeature
from penstock.kernels.quantized import GROUP_MULTIPLE, minimums_of
from penstock.loader.quantized.grid import Grid
from penstock.loader.quantized.unpacking import PER_WORD, check_shape, input_order, unpack_columns, unpack_rows

# Offset of stored symmetric 4-bit integers.
_MIDDLE = 8
_ONE_IN_EACH = 0x11111111
# Positions of the integers in a word of AWQ.
_AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


class CheckpointFormat(ABC):
    """Checkpoint format. required, optional: tensors of a quantised layer, by the last part of their names."""

    required: frozenset[str]
    optional: frozenset[str] = frozenset()

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        self.checkpoint = checkpoint

    @abstractmethod
    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Grid]:
        """Return the integers by group [O, I] and their grid. Raises CheckpointError for tensors that do not fit."""

    def _groups(self, num_inputs: int) -> tuple[int, int]:
        """Return group size and number of groups."""
        group_size = min(self.checkpoint.group_size or num_inputs, num_inputs)
        return group_size, -(-num_inputs // group_size)

    def _order(self, layer: str, name: str, tensors: Mapping[str, Tensor], num_inputs: int) -> Tensor | None:
        """Return the inputs by group, by the tensor of this name; None without it, or if groups are contiguous."""
        if name not in tensors:
            return None
        check_shape(f"{layer}.{name}", tensors[name], torch.int32, num_inputs)
        is_reordered = self.checkpoint.is_reordered
        return input_order(f"{layer}.{name}", tensors[name], *self._groups(num_inputs), is_reordered=is_reordered)


class GptqFormat(CheckpointFormat):
    """GPTQ: qweight [W of I, O], qzeros [G, W of O], scales [G, O], g_idx [I]."""

    required = frozenset(("qweight", "qzeros", "scales"))
    optional = frozenset(("g_idx",))

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        super().__init__(checkpoint)
        if checkpoint.is_reordered:
            self.required, self.optional = self.required | self.optional, frozenset()

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Grid]:
        words = tensors["qweight"]
        num_inputs, num_outputs = words.shape[0] * PER_WORD, words.shape[-1]
        group_size, num_groups = self._groups(num_inputs)
        check_shape(f"{layer}.qweight", words, torch.int32, num_inputs // PER_WORD, num_outputs)
        check_shape(f"{layer}.qzeros", tensors["qzeros"], torch.int32, num_groups, num_outputs // PER_WORD)
        _check_scales(f"{layer}.scales", tensors["scales"], num_groups, num_outputs)
        # Version 1 stores zero points minus one, as one subtraction per word, so that a zero borrows.
        less = 0 if self.checkpoint.layout == GPTQ_V2 else _ONE_IN_EACH
        zeros_GO = unpack_columns(tensors["qzeros"] + less)
        order_I = self._order(layer, "g_idx", tensors, num_inputs)
        values_OI = unpack_rows(words).t()
        scales_OG = tensors["scales"].t().float().contiguous()
        grid = Grid(4, group_size, scales_OG, minimums_of(zeros_GO.t(), scales_OG), order_I=order_I)
        return values_OI if order_I is None else values_OI[:, order_I], grid


class AwqFormat(CheckpointFormat):
    """AWQ: qweight [I, W of O], qzeros [G, W of O], scales [G, O]; the integers of a word are interleaved."""

    required = frozenset(("qweight", "qzeros", "scales"))

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Grid]:
        words = tensors["qweight"]
        num_inputs, num_outputs = words.shape[0], words.shape[-1] * PER_WORD
        group_size, num_groups = self._groups(num_inputs)
        check_shape(f"{layer}.qweight", words, torch.int32, num_inputs, num_outputs // PER_WORD)
        check_shape(f"{layer}.qzeros", tensors["qzeros"], torch.int32, num_groups, num_outputs // PER_WORD)
        _check_scales(f"{layer}.scales", tensors["scales"], num_groups, num_outputs)
        zeros_GO = unpack_columns(tensors["qzeros"], _AWQ_POSITIONS)
        values_IO = unpack_columns(words, _AWQ_POSITIONS)
        scales_OG = tensors["scales"].t().float().contiguous()
        return values_IO.t(), Grid(4, group_size, scales_OG, minimums_of(zeros_GO.t(), scales_OG))


class PackedCompressedFormat(CheckpointFormat):
    """compressed-tensors, packed int4: weight_packed [O, W of I], weight_scale [O, G], weight_shape [2];
    weight_zero_point [W of O, G] if asymmetric, weight_g_idx [I] with activation order.
    """

    required = frozenset(("weight_packed", "weight_scale", "weight_shape"))
    optional = frozenset(("weight_zero_point", "weight_g_idx"))

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        super().__init__(checkpoint)
        moved = {"weight_g_idx"} if checkpoint.is_reordered else set()
        if not checkpoint.is_symmetric:
            moved.add("weight_zero_point")
        self.required, self.optional = self.required | moved, self.optional - moved

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Grid]:
        check_shape(f"{layer}.weight_shape", tensors["weight_shape"], tensors["weight_shape"].dtype, 2)
        words = tensors["weight_packed"]
        if tensors["weight_shape"].is_meta:  # only names and shapes are known
            num_outputs, num_inputs = words.shape[0], words.shape[-1] * PER_WORD
        else:
            num_outputs, num_inputs = (int(size) for size in tensors["weight_shape"])
        group_size, num_groups = self._groups(num_inputs)
        num_words = -(-num_inputs // PER_WORD)
        check_shape(f"{layer}.weight_packed", words, torch.int32, num_outputs, num_words)
        _check_scales(f"{layer}.weight_scale", tensors["weight_scale"], num_outputs, num_groups)
        zeros_OG = torch.full((num_outputs, num_groups), _MIDDLE, dtype=torch.uint8)
        if "weight_zero_point" in tensors:
            zeros, num_rows = tensors["weight_zero_point"], -(-num_outputs // PER_WORD)
            check_shape(f"{layer}.weight_zero_point", zeros, torch.int32, num_rows, num_groups)
            zeros_OG = unpack_rows(zeros)[:num_outputs].contiguous()
        order_I = self._order(layer, "weight_g_idx", tensors, num_inputs)
        values_OI = unpack_columns(words)[:, :num_inputs]
        scales_OG = tensors["weight_scale"].float()
        grid = Grid(4, group_size, scales_OG, minimums_of(zeros_OG, scales_OG), order_I=order_I)
        return values_OI if order_I is None else values_OI[:, order_I], grid


class Int8CompressedFormat(CheckpointFormat):
    """compressed-tensors, int8: weight [O, I], weight_scale [O, 1] or a scalar."""

    required = frozenset(("weight", "weight_scale"))

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Grid]:
        values_OI, scale = tensors["weight"], tensors["weight_scale"]
        if values_OI.dim() != 2:
            raise CheckpointError(f"{layer}.weight is {list(values_OI.shape)}, not a matrix.")
        num_outputs, num_inputs = values_OI.shape
        check_shape(f"{layer}.weight", values_OI, torch.int8, num_outputs, num_inputs)
        if scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(num_outputs, 1)
        _check_scales(f"{layer}.weight_scale", scale, num_outputs, 1)
        return values_OI, Grid(8, num_inputs, scale.float().contiguous())


class TorchaoFormat(CheckpointFormat):
    """torchao: _weight_qdata [O, I] of bytes, _weight_scale [O, 1]; for int4 (-8 to 7), _weight_scale and
    _weight_zero_point [O, G].
    """

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        super().__init__(checkpoint)
        zeros = {"_weight_zero_point"} if checkpoint.bits == 4 else set()
        self.required = frozenset(("_weight_qdata", "_weight_scale", *zeros))

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Grid]:
        values_OI, scale = tensors["_weight_qdata"], tensors["_weight_scale"]
        if values_OI.dim() != 2 or scale.dim() != 2:
            raise CheckpointError(
                f"{layer}._weight_qdata is {list(values_OI.shape)} and its scale {list(scale.shape)}, not matrices."
            )
        num_outputs, num_inputs = values_OI.shape
        num_groups = scale.shape[1] if self.checkpoint.bits == 4 else 1
        check_shape(f"{layer}._weight_qdata", values_OI, torch.int8, num_outputs, num_inputs)
        _check_scales(f"{layer}._weight_scale", scale, num_outputs, num_groups)
        if self.checkpoint.bits == 8:
            return values_OI, Grid(8, num_inputs, scale.float())
        zeros_OG = tensors["_weight_zero_point"]
        check_shape(f"{layer}._weight_zero_point", zeros_OG, torch.int8, num_outputs, num_groups)
        group_size = num_inputs // num_groups
        if group_size * num_groups != num_inputs or (num_groups > 1 and group_size % GROUP_MULTIPLE):
            raise UnsupportedFeature(
                f"{layer} has {num_groups} groups of {num_inputs} inputs. Supported: groups of a multiple of "
                f"{GROUP_MULTIPLE}, and whole rows."
            )
        zeros_OG = (zeros_OG + _MIDDLE).to(torch.uint8)
        return values_OI + _MIDDLE, Grid(4, group_size, scale.float(), minimums_of(zeros_OG, scale))


def format_of(checkpoint: QuantizedCheckpoint) -> CheckpointFormat:
    """Return the format that `config.json` describes."""
    if checkpoint.method == GPTQ:
        return GptqFormat(checkpoint)
    if checkpoint.method == AWQ:
        return AwqFormat(checkpoint)
    if checkpoint.method == TORCHAO:
        return TorchaoFormat(checkpoint)
    if checkpoint.layout == INT_QUANTIZED:
        return Int8CompressedFormat(checkpoint)
    return PackedCompressedFormat(checkpoint)


def _check_scales(name: str, scales: Tensor, *shape: int) -> None:
    if not scales.is_floating_point():
        raise CheckpointError(f"{name} is {scales.dtype}, not floating point.")
    check_shape(name, scales, scales.dtype, *shape)
