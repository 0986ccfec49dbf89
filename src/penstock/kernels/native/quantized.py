"""Products with quantised weights in C++: `kernels.quantized` for each instruction set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native import NATIVE, NativeKernels
from penstock.kernels.native import _module as _library
from penstock.kernels.native.library import Library
from penstock.kernels.native.memory import weight_memory
from penstock.kernels.native.tracing import Kernel, TracedTensor, floats
from penstock.kernels.quantized import QuantizedShape, QuantizedWeight


class NativeQuantizedProducts:
    """The library's functions for one instruction set. Every result has the same bits for any number of threads, and
    for a row alone and in any batch.
    """

    def __init__(self, module: Any, index: int, name: str) -> None:
        self.name = name
        self.index = index
        self._module = module

    def pack(self, weight: QuantizedWeight) -> Tensor:
        packed = weight_memory(self._module.quantized_packed_bytes(self.index, *weight.shape.kernel_sizes))
        self._convert(self._module.quantized_pack, weight, packed)
        return packed

    def unpack(self, packed: Tensor, shape: QuantizedShape) -> QuantizedWeight:
        weight = QuantizedWeight(
            shape,
            torch.empty(shape.output_size, shape.input_size, dtype=torch.int8),
            torch.empty(shape.output_size, shape.num_groups),
            None if shape.bits == 8 else torch.empty(shape.output_size, shape.num_groups, dtype=torch.uint8),
        )
        self._convert(self._module.quantized_unpack, weight, packed)
        return weight

    def linear(self, x_TI: Tensor, packed: Tensor, shape: QuantizedShape, bias_O: Tensor | None) -> Tensor:
        if isinstance(x_TI, TracedTensor):
            arguments = self.index, packed, floats(bias_O), *shape.kernel_sizes
            return x_TI.origin.add(Kernel.QUANTIZED_LINEAR, x_TI, shape.output_size, *arguments)
        if x_TI.dim() != 2:
            flat_TI = x_TI.reshape(-1, x_TI.shape[-1])
            return self.linear(flat_TI, packed, shape, bias_O).view(*x_TI.shape[:-1], shape.output_size)
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        num_rows = x_TI.shape[0]
        out_TO = torch.empty(num_rows, shape.output_size)
        self._module.quantized_linear(
            self.index,
            *shape.kernel_sizes,
            x_TI.data_ptr(),
            x_TI.stride(0),
            packed.data_ptr(),
            0 if bias_O is None else bias_O.data_ptr(),
            out_TO.data_ptr(),
            shape.output_size,
            num_rows,
            torch.get_num_threads(),
        )
        return out_TO

    def rows(self, ids_T: Tensor, packed: Tensor, shape: QuantizedShape, rest: Tensor | None = None) -> Tensor:
        if isinstance(ids_T, TracedTensor):
            arguments = self.index, packed, rest, *shape.kernel_sizes
            return ids_T.origin.look_up(Kernel.QUANTIZED_ROWS, ids_T, shape.input_size, *arguments)
        ids_T = ids_T.to(torch.int32)
        out_TI = torch.empty(ids_T.shape[0], shape.input_size)
        self._module.quantized_rows(
            self.index,
            *shape.kernel_sizes,
            packed.data_ptr(),
            0 if rest is None else rest.data_ptr(),
            ids_T.data_ptr(),
            out_TI.data_ptr(),
            ids_T.shape[0],
            torch.get_num_threads(),
        )
        return out_TI

    def _convert(self, function: Any, weight: QuantizedWeight, packed: Tensor) -> None:
        values_OI, scales_OG = weight.values_OI.contiguous(), weight.scales_OG.contiguous()
        zeros_OG = None if weight.zeros_OG is None else weight.zeros_OG.contiguous()
        function(
            self.index,
            *weight.shape.kernel_sizes,
            values_OI.data_ptr(),
            scales_OG.data_ptr(),
            0 if zeros_OG is None else zeros_OG.data_ptr(),
            packed.data_ptr(),
        )


def available_quantized_products() -> list[NativeQuantizedProducts]:
    """For what was built and this processor can run, best first; empty when nothing was built."""
    if _library is None:
        return []
    library = Library(_library)
    return [NativeQuantizedProducts(library, index, name) for index, name in _library.quantized_instruction_sets()]


def native_quantized_products(kernels: NativeKernels | None = NATIVE) -> NativeQuantizedProducts | None:
    """Those for the instruction set of the other kernels, with its extensions for bytes if there are any."""
    if kernels is None:
        return None
    wanted = kernels.instruction_set.name
    return next((found for found in available_quantized_products() if found.name.startswith(wanted)), None)
