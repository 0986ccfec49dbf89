"""Products with quantised weights in C++: `kernels.quantized` for each instruction set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.device.huge_pages import weight_memory
from penstock.kernels.native import (
    NATIVE,
    WEIGHT_TYPES,
    InstructionSet,
    NativeKernels,
    as_ids,
    available_instruction_sets,
)
from penstock.kernels.native import _module as _library
from penstock.kernels.native.library import Library
from penstock.kernels.native.operation_types import operation_types
from penstock.kernels.native.operations import NativeOperation
from penstock.kernels.quantized import GROUP_MULTIPLE, QuantizedShape, QuantizedWeight


class NativeQuantizedProducts:
    """The library's functions for one instruction set. Results do not depend on threads or batch.

    base: the instruction set of the other kernels beside them. panel_width: output features that are packed together.
    """

    keeps_dtype = False

    def __init__(self, module: Any, index: int, name: str, base: InstructionSet) -> None:
        self.name = name
        self.index = index
        self._module = module
        self.panel_width = base.panel_width
        types = operation_types(module)
        self._linear = NativeOperation(_library.operation, base.index, types["quantized_linear"])
        self._rows = NativeOperation(_library.operation, base.index, types["quantized_rows"])

    def pack(self, weight: QuantizedWeight) -> Tensor:
        packed = weight_memory(self.packed_bytes(weight.shape))
        self._convert(self._module.quantized_pack, weight, packed)
        return packed

    def packed_bytes(self, shape: QuantizedShape) -> int:
        """Bytes of a packed weight."""
        return int(self._module.quantized_packed_bytes(self.index, *shape.kernel_sizes))

    def nearest_shape(self, weight_OI: Tensor, bits: int) -> QuantizedShape | None:
        """The format that `pack_nearest` makes of a weight; None if it cannot."""
        if not weight_OI.is_cpu or weight_OI.dtype not in WEIGHT_TYPES or weight_OI.shape[1] < GROUP_MULTIPLE:
            return None
        num_outputs, num_inputs = weight_OI.shape
        return QuantizedShape(bits, num_outputs, num_inputs, GROUP_MULTIPLE, has_minimums=bits == 4, scale_bytes=2)

    def pack_nearest(
        self, weight_OI: Tensor, shape: QuantizedShape, packed: Tensor, residual: Tensor | None = None
    ) -> bool:
        """Quantise a weight to the nearest integers and pack it in one pass, bit for bit as `layers.quantization`.

        shape: from `nearest_shape`. residual: memory of the packed quantisation errors of a weight of 4 bits. Returns
        whether all scales and minimums are finite in float16; otherwise the memory has no valid weight.
        """
        if weight_OI.stride(1) != 1:
            weight_OI = weight_OI.contiguous()
        arguments = weight_OI, weight_OI.stride(0), WEIGHT_TYPES[weight_OI.dtype], packed, residual
        return bool(self._module.quantized_round(self.index, *shape.kernel_sizes, *arguments, torch.get_num_threads()))

    def unpack(self, packed: Tensor, shape: QuantizedShape) -> QuantizedWeight:
        weight = QuantizedWeight(
            shape,
            torch.empty(shape.output_size, shape.input_size, dtype=torch.int8),
            torch.empty(shape.output_size, shape.num_groups),
            torch.empty(shape.output_size, shape.num_groups) if shape.has_minimums else None,
        )
        self._convert(self._module.quantized_unpack, weight, packed)
        return weight

    def linear(self, x_TI: Tensor, packed: Tensor, shape: QuantizedShape, bias_O: Tensor | None) -> Tensor:
        if x_TI.dim() != 2:
            flat_TI = x_TI.reshape(-1, x_TI.shape[-1])
            return self.linear(flat_TI, packed, shape, bias_O).view(*x_TI.shape[:-1], shape.output_size)
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        return self._linear.rows(x_TI, shape.output_size, self.index, packed, bias_O, *shape.kernel_sizes)

    def rows(self, ids_T: Tensor, packed: Tensor, shape: QuantizedShape, rest: Tensor | None = None) -> Tensor:
        return self._rows.look_up(as_ids(ids_T), shape.input_size, self.index, packed, rest, *shape.kernel_sizes)

    def _convert(self, function: Any, weight: QuantizedWeight, packed: Tensor) -> None:
        values_OI, scales_OG = weight.values_OI.contiguous(), weight.scales_OG.contiguous()
        minimums_OG = None if weight.minimums_OG is None else weight.minimums_OG.contiguous()
        sizes = self.index, *weight.shape.kernel_sizes
        function(*sizes, values_OI, scales_OG, minimums_OG, packed, torch.get_num_threads())


def available_quantized_products() -> list[NativeQuantizedProducts]:
    """Built products that this CPU supports, best first; empty without a build."""
    if _library is None:
        return []
    library = Library(_library)
    bases = available_instruction_sets()
    return [
        NativeQuantizedProducts(library, index, name, next(base for base in bases if name.startswith(base.name)))
        for index, name in _library.quantized_instruction_sets()
    ]


# Number of the products that `emulated_tile_products` returns.
_EMULATED_TILES = 5


def emulated_tile_products() -> NativeQuantizedProducts | None:
    """Products by AMX's tiles on a CPU without them, for tests; None without a build for AVX2."""
    base = next((found for found in available_instruction_sets() if found.name == "avx2"), None)
    if base is None:
        return None
    return NativeQuantizedProducts(Library(_library), _EMULATED_TILES, "avx2 by emulated tiles", base)


def native_quantized_products(kernels: NativeKernels | None = NATIVE) -> NativeQuantizedProducts | None:
    """The products for the instruction set of the other kernels, with its int8 extensions if available."""
    if kernels is None:
        return None
    wanted = kernels.instruction_set.name
    return next((found for found in available_quantized_products() if found.name.startswith(wanted)), None)
