"""Linear methods with quantised weights, and their choice at loading.

Suffixes: T tokens, I input features, O output features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.device.huge_pages import weight_memory
from penstock.device.stand_in import is_on_cpu
from penstock.kernels.gpu_quantized import GpuQuantizedProducts, stored_weight
from penstock.kernels.native import NATIVE
from penstock.kernels.native.quantized import NativeQuantizedProducts, native_quantized_products
from penstock.kernels.quantized import (
    QuantizedProducts,
    QuantizedShape,
    QuantizedWeight,
    TorchQuantizedProducts,
)
from penstock.kernels.stored_weight import StoredWeight
from penstock.layers.linear import LinearLayer, LinearMethod, PackedMethod, argmax_on_gpu
from penstock.layers.quantization.quantize import quantize_int4, quantize_int4_residual, quantize_int8
from penstock.layers.weights import RowLookup

Quantizer = Callable[[Tensor], QuantizedWeight]
PRODUCTS: QuantizedProducts = native_quantized_products() or TorchQuantizedProducts()
_OF_GPUS: QuantizedProducts = GpuQuantizedProducts()
_INVARIANT_OF_GPUS: QuantizedProducts = GpuQuantizedProducts(is_invariant=True)


def products_on(kind: str, *, is_invariant: bool) -> QuantizedProducts:
    """The products of a kind of device. is_invariant: with results that do not depend on the batch, on a GPU too."""
    return PRODUCTS if kind == "cpu" else _INVARIANT_OF_GPUS if is_invariant else _OF_GPUS


# Bits of the quantizers that round to nearest, which the C++ kernels do in one pass.
_NEAREST: Mapping[Quantizer | None, int] = {quantize_int8: 8, quantize_int4: 4}

# Layers that int4 keeps wider on a CPU, for logs.
WIDER_LAYERS = "MLPs' second products, which have massive inputs, to int8"


class QuantizedMethod(PackedMethod):
    """Int8 or int4 weights, made by `quantize`. On a CPU activations are quantised to int8 at run time."""

    def __init__(self, quantize: Quantizer, products: QuantizedProducts | None = None) -> None:
        super().__init__()
        # None once the weight is packed, since a grid of a checkpoint has scales of its own.
        self._quantize: Quantizer | None = quantize
        self._given = products
        self._products = products or PRODUCTS
        self.shape: QuantizedShape | None = None
        # Of a packed weight of the same form, to pack into; empty for new memory.
        self._memory: tuple[Tensor, ...] = ()

    @property
    def description(self) -> str:
        name = super().description
        return name if self.shape is None else f"{name}, {self.shape.description}"

    def process_weights_after_loading(self, layer: LinearLayer) -> None:
        kind = "cpu" if is_on_cpu(layer.weight) else "cuda"
        self._products = self._given or products_on(kind, is_invariant=layer.batch_invariant)
        super().process_weights_after_loading(layer)
        self._quantize = None

    def adopt(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> None:
        super().adopt(layer, tensors)
        self._quantize = None

    def unpacked(self, packed_OI: Tensor) -> QuantizedWeight:
        """The quantised weight in one of this method's packed tensors, bit for bit."""
        assert self.shape is not None, "unpacked before pack"
        return self._products.unpack(packed_OI, self.shape)

    def packed(self, weight: QuantizedWeight) -> Tensor:
        """Pack a quantised weight for this method's kernels."""
        return self._products.pack(weight)

    def pack(self, weight_OI: Tensor) -> Tensor:
        assert self._quantize is not None, "a method packs one weight"
        if weight_OI.is_meta:
            self.shape, size, dtype = _packed_form(self._quantize, self._products, tuple(weight_OI.shape))  # type: ignore[arg-type]
            return weight_OI.new_empty(size, dtype=dtype)
        packed = self._pack_nearest(weight_OI, 1)
        if packed is not None:
            return packed[0]
        weight = self._quantize(weight_OI)
        self.shape = weight.shape
        return self._products.pack(weight)

    def _nearest_shape(self, weight_OI: Tensor) -> QuantizedShape | None:
        """The format of a weight that is quantised and packed in one pass; None where that is not possible."""
        bits = 8 if isinstance(self._quantize, _Int8OnCpu) else _NEAREST.get(self._quantize)
        if bits is None or not isinstance(self._products, NativeQuantizedProducts):
            return None
        return self._products.nearest_shape(weight_OI, bits)

    def _pack_nearest(self, weight_OI: Tensor, num_packed: int) -> Sequence[Tensor] | None:
        """Quantise and pack in one pass, where that is possible: the packed weight, and with 2 its packed residual."""
        memory, self._memory = self._memory, ()
        shape = self._nearest_shape(weight_OI)
        if shape is None:
            return None
        assert isinstance(self._products, NativeQuantizedProducts), "has a shape"
        num_bytes = self._products.packed_bytes(shape)
        fits = [packed.numel() for packed in memory] == [num_bytes] * num_packed
        packed = memory if fits else [weight_memory(num_bytes) for _ in range(num_packed)]
        if not self._products.pack_nearest(weight_OI, shape, *packed):
            return None
        self.shape = shape
        return packed

    def pack_into(self, other: PackedMethod) -> None:
        self._memory = other.kept

    def takes_rows(self, other: LinearMethod, sample_RI: Tensor, begin: int, num_rows: int) -> bool:
        assert self.shape is not None, "takes_rows before pack"
        if type(other) is not type(self) or not isinstance(self._products, NativeQuantizedProducts):
            return False
        shape, width, end = other._nearest_shape(sample_RI), self._products.panel_width, begin + num_rows
        are_panels = begin % width == 0 and (end % width == 0 or end == self.shape.output_size)
        return are_panels and shape is not None and self._of_rows(shape.output_size) == shape

    def replace_rows(self, weight_RI: Tensor, begin: int) -> bool:
        assert isinstance(self._products, NativeQuantizedProducts), "takes_rows"
        first, shape = self._products.packed_bytes(self._of_rows(begin)), self._of_rows(len(weight_RI))
        places = [packed[first:] for packed in self.kept]
        return self._products.pack_nearest(weight_RI, shape, *places)

    def _of_rows(self, num_rows: int) -> QuantizedShape:
        assert self.shape is not None, "rows before pack"
        return _of_rows(self.shape, num_rows)

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        """The dequantised weight, float32."""
        assert self.shape is not None, "unpack before pack"
        return self._products.unpack(packed_OI, self.shape).dequantize()

    def loaded_weight(self, layer: LinearLayer) -> Tensor | None:
        return None

    def stored_weight(self, layer: LinearLayer) -> StoredWeight | None:
        if self.packed_OI is None or self.shape is None or not isinstance(self._products, GpuQuantizedProducts):
            return None
        return stored_weight(self.packed_OI, self.shape)

    def row_lookup(self, packed_OI: Tensor) -> RowLookup:
        assert self.shape is not None, "row_lookup before pack"
        return _QuantizedRows(self._products, self.shape, packed_OI)

    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        assert self.shape is not None, "multiply before pack"
        if self._products.keeps_dtype:
            return self._products.linear(x_TI, packed_OI, self.shape, bias_O)
        if bias_O is not None and bias_O.dtype is not torch.float32:
            bias_O = bias_O.float()
        if x_TI.dtype is torch.float32:
            return self._products.linear(x_TI, packed_OI, self.shape, bias_O)
        return self._products.linear(x_TI.float(), packed_OI, self.shape, bias_O).to(x_TI.dtype)

    def argmax(
        self, layer: LinearLayer, x_LI: Tensor, *, with_largest: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if self._products.keeps_dtype:
            return argmax_on_gpu(self.apply(layer, x_LI))
        if NATIVE is None or x_LI.dtype is not torch.float32:
            return None
        return NATIVE.argmax(self.apply(layer, x_LI), with_largest=with_largest)


@functools.lru_cache(maxsize=1024)
def _of_rows(shape: QuantizedShape, num_rows: int) -> QuantizedShape:
    """The format of some rows of a weight."""
    return replace(shape, output_size=num_rows)


@functools.lru_cache(maxsize=256)
def _packed_form(
    quantize: Quantizer, products: QuantizedProducts, shape: tuple[int, ...]
) -> tuple[QuantizedShape, torch.Size, torch.dtype]:
    """Shape, and size and dtype of the packed form, of float32 weights: the same for all layers of equal shape."""
    weight = quantize(torch.empty(shape, device="meta"))
    packed = products.pack(weight)
    return weight.shape, packed.shape, packed.dtype


class Int4ResidualMethod(QuantizedMethod):
    """Int4 weight with 4 more bits of precision for its rows: an output projection tied to an embedding.

    Errors in embedding rows propagate through all layers, those in the LM head's products through none.
    """

    def __init__(self, quantize: Quantizer, products: QuantizedProducts | None = None) -> None:
        super().__init__(quantize, products)
        self._rest_OI: Tensor | None = None

    def pack(self, weight_OI: Tensor) -> Tensor:
        assert self._quantize is not None, "a method packs one weight"
        packed = self._pack_nearest(weight_OI, 2)
        if packed is not None:
            self._rest_OI = packed[1]
            return packed[0]
        rounded = self._quantize(weight_OI)
        self.shape = rounded.shape
        self._rest_OI = self._products.pack(quantize_int4_residual(weight_OI, rounded))
        return self._products.pack(rounded)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return super().kept if self._rest_OI is None else (*super().kept, self._rest_OI)

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        assert self._rest_OI is not None, "unpack before pack"
        return super().unpack(packed_OI, output_size) + super().unpack(self._rest_OI, output_size)

    def row_lookup(self, packed_OI: Tensor) -> RowLookup:
        assert self.shape is not None, "row_lookup before pack"
        return _QuantizedRows(self._products, self.shape, packed_OI, self._rest_OI)

    def restore_weights(self, layer: LinearLayer) -> None:
        super().restore_weights(layer)
        self._rest_OI = None


class ReorderedMethod(QuantizedMethod):
    """order_I: input features, group by group, of a weight whose groups are not contiguous (act-order)."""

    def __init__(self, quantize: Quantizer, order_I: Tensor, products: QuantizedProducts | None = None) -> None:
        super().__init__(quantize, products)
        self._order_I = order_I
        self._places_I = torch.argsort(order_I)

    def pack(self, weight_OI: Tensor) -> Tensor:
        self._order_I = self._order_I.to(weight_OI.device)
        self._places_I = self._places_I.to(weight_OI.device)
        return super().pack(weight_OI.index_select(1, self._order_I))

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return *super().kept, self._order_I, self._places_I

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        return super().unpack(packed_OI, output_size).index_select(1, self._places_I)

    def stored_weight(self, layer: LinearLayer) -> None:
        return None  # its kernels would have to reorder inputs

    def row_lookup(self, packed_OI: Tensor) -> RowLookup:
        return _ReorderedRows(super().row_lookup(packed_OI), self._places_I)

    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        return super().multiply(x_TI.index_select(-1, self._order_I), packed_OI, output_size, bias_O)


@dataclass(frozen=True, slots=True)
class _QuantizedRows(RowLookup):
    products: QuantizedProducts
    shape: QuantizedShape
    packed_OI: Tensor
    rest_OI: Tensor | None = None

    def __call__(self, ids_T: Tensor) -> Tensor:
        return self.products.rows(ids_T, self.packed_OI, self.shape, self.rest_OI)


@dataclass(frozen=True, slots=True)
class _ReorderedRows(RowLookup):
    rows: RowLookup
    places_I: Tensor

    def __call__(self, ids_T: Tensor) -> Tensor:
        return self.rows(ids_T).index_select(1, self.places_I)


MethodChoice = Callable[[LinearLayer], LinearMethod]


def choose_method(quantization: str) -> MethodChoice:
    """Return the choice of a `LinearMethod` for float weights. quantization: "int8" or "int4"."""
    if quantization == "int8":
        return lambda _layer: QuantizedMethod(quantize_int8)
    return lambda layer: int4_method(layer, quantize_int4)


def int4_method(layer: LinearLayer, quantize: Quantizer) -> LinearMethod:
    """Return the int4 method of a layer. quantize: quantises its weight.

    On a CPU a layer with massive inputs gets int8.
    """
    if layer.tied_to:
        return Int4ResidualMethod(quantize)
    return QuantizedMethod(_Int8OnCpu(quantize) if layer.has_massive_inputs else quantize)


@dataclass(frozen=True, slots=True)
class _Int8OnCpu:
    """Quantisation to int8 on a CPU, and by another quantizer elsewhere."""

    elsewhere: Quantizer

    def __call__(self, weight_OI: Tensor) -> QuantizedWeight:
        return quantize_int8(weight_OI) if is_on_cpu(weight_OI) else self.elsewhere(weight_OI)
