"""Linear layers, and the methods of their products.

A `LinearMethod`, chosen after loading, decides the layout of the weight.
Suffixes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.device.stand_in import is_on_cpu
from penstock.kernels.linear import (
    batch_invariant_linear,
    linear,
    pack_weight,
    packed_linear,
    packing_pays,
    unpack_weight,
)
from penstock.kernels.native import NATIVE, Bfloat16Layout, NativeKernels, describe_bfloat16_products
from penstock.kernels.stored_weight import StoredWeight
from penstock.kernels.triton import triton_runs
from penstock.layers.adapters import LinearAdapters
from penstock.layers.weights import Part, RowLookup, RowReader, Shard, WidensWeight, empty_like_weight, new_parameter
from penstock.system.env import uses_torch_products


class ScalableInputs(Protocol):
    """Producer of a layer's inputs that can scale each of them exactly. is_replicated: whether every rank has all."""

    is_replicated: bool

    def divide(self, scales_I: Tensor) -> None:
        """Divide the input features by these."""


class LinearMethod(ABC):
    """The matrix product of a linear layer, and the layout of its weight."""

    @property
    def description(self) -> str:
        """Name of the method, and the format of its weight, for the model inspection."""
        return type(self).__name__

    @abstractmethod
    def process_weights_after_loading(self, layer: LinearLayer) -> None:
        """Convert the layer's loaded weight to this method's layout."""

    @abstractmethod
    def restore_weights(self, layer: LinearLayer) -> None:
        """Undo `process_weights_after_loading`, so that `layer.weight` holds the weight again."""

    @abstractmethod
    def apply(self, layer: LinearLayer, x_TI: Tensor) -> Tensor:
        """x @ weight^T + bias: [T, O]."""

    def argmax(
        self, layer: LinearLayer, x_LI: Tensor, *, with_largest: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Argmax of `apply` over the outputs, and whether a row failed (is not finite): int64 [L] and bool [L].

        None where there is no fused kernel. The layer has no bias. with_largest: return the maxima too, float32 [L].
        """
        return None

    def loaded_weight(self, layer: LinearLayer) -> Tensor | None:
        """The layer's weight as it was loaded, [O, I]; None for a quantised one."""
        return layer.weight

    def stored_weight(self, layer: LinearLayer) -> StoredWeight | None:
        """The weight as a GPU's kernels read it; None where they cannot."""
        return None


class PlainMethod(LinearMethod):
    """Multiplies by the weight as loaded."""

    def process_weights_after_loading(self, layer: LinearLayer) -> None: ...

    def restore_weights(self, layer: LinearLayer) -> None: ...

    def apply(self, layer: LinearLayer, x_TI: Tensor) -> Tensor:
        product = batch_invariant_linear if layer.batch_invariant else linear
        return product(x_TI, layer.weight, layer.bias)

    def stored_weight(self, layer: LinearLayer) -> StoredWeight:
        return StoredWeight.plain(layer.weight)

    def argmax(
        self, layer: LinearLayer, x_LI: Tensor, *, with_largest: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Argmax of the products; on a GPU of products that are not converted to float32."""
        return argmax_on_gpu(self.apply(layer, x_LI)) if triton_runs(x_LI) else None


def argmax_on_gpu(logits_LV: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Argmax of rows, as `LinearMethod.argmax`; None where Triton does not run."""
    if not triton_runs(logits_LV):
        return None
    from penstock.kernels.triton.sampling import argmax

    return argmax(logits_LV)


class PackedMethod(LinearMethod):
    """Keeps the weight packed for its kernels instead of as loaded."""

    def __init__(self) -> None:
        self.packed_OI: Tensor | None = None

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """All tensors of the packed weight."""
        return () if self.packed_OI is None else (self.packed_OI,)

    @abstractmethod
    def pack(self, weight_OI: Tensor) -> Tensor:
        """Pack a weight for `multiply`."""

    @abstractmethod
    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        """Restore the packed weight bit for bit: [O, I]."""

    def row_lookup(self, packed_OI: Tensor) -> RowLookup | None:
        """Return a lookup of the weight's rows in packed form, if possible."""
        return None

    def loaded_weight(self, layer: LinearLayer) -> Tensor | None:
        return layer.weight if self.packed_OI is None else self.unpack(self.packed_OI, layer.output_size)

    @abstractmethod
    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        """x @ weight^T + bias: [T, O]."""

    def pack_into(self, other: PackedMethod) -> None:
        """Pack the next weight into the memory of another method of this class, if it gets the same form."""

    def takes_rows(self, other: LinearMethod, sample_RI: Tensor, begin: int, num_rows: int) -> bool:
        """Whether `replace_rows` can take these rows of a weight that another method would pack to the same form.

        sample_RI: some of them.
        """
        return False

    def replace_rows(self, weight_RI: Tensor, begin: int) -> bool:
        """Pack rows into their place in the packed weight.

        Returns whether their values fit its form; if not, the weight is undefined.
        """
        raise AssertionError("takes_rows")

    def process_weights_after_loading(self, layer: LinearLayer) -> None:
        self.packed_OI = self.pack(layer.weight.detach())
        layer.drop_weight(self.row_lookup(self.packed_OI))

    def adopt(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> None:
        """Take a weight that is packed already, by this method's attributes, in place of the layer's."""
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        assert self.packed_OI is not None, "packed tensors"
        layer.drop_weight(self.row_lookup(self.packed_OI))

    def restore_weights(self, layer: LinearLayer) -> None:
        if self.packed_OI is not None and layer.weight.numel() == 0:
            layer.take_weight(self.unpack(self.packed_OI, layer.output_size))
        self.packed_OI = None

    def apply(self, layer: LinearLayer, x_TI: Tensor) -> Tensor:
        assert self.packed_OI is not None, "apply before process_weights_after_loading"
        return self.multiply(x_TI, self.packed_OI, layer.output_size, layer.bias)


class WeightChanges:
    """Count of the replacements of some layers' weights, for products that have the addresses of all of them."""

    def __init__(self) -> None:
        self.count = 0


class OneDnnMethod(PackedMethod):
    """oneDNN's packed products, through torch."""

    def pack(self, weight_OI: Tensor) -> Tensor:
        return pack_weight(weight_OI)

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        return unpack_weight(packed_OI)

    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        return packed_linear(x_TI, packed_OI, bias_O)


class NativeMethod(PackedMethod):
    """Penstock's C++ kernels."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        # Of a weight of the same form, to pack into; None for new memory.
        self._memory: Tensor | None = None

    @property
    def _layout(self) -> Bfloat16Layout | None:
        return None

    def pack(self, weight_OI: Tensor) -> Tensor:
        return self._kernels.pack_weight(weight_OI, bfloat16=self._layout, out=self._memory)

    def pack_into(self, other: PackedMethod) -> None:
        self._memory = other.packed_OI

    def takes_rows(self, other: LinearMethod, sample_RI: Tensor, begin: int, num_rows: int) -> bool:
        width = self._kernels.panel_width(self._layout)
        return type(other) is type(self) and width is not None and begin % width == 0 and num_rows % width == 0

    def replace_rows(self, weight_RI: Tensor, begin: int) -> bool:
        assert self.packed_OI is not None, "replace_rows before process_weights_after_loading"
        place = self.packed_OI[begin : begin + weight_RI.shape[0]]
        packed = self._kernels.pack_weight(weight_RI, bfloat16=self._layout, out=place)
        assert packed is place, "rows of another form than the packed weight's"
        return True

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        return self._kernels.unpack_weight(packed_OI, output_size)

    def row_lookup(self, packed_OI: Tensor) -> RowLookup:
        return _PackedRows(self._kernels, packed_OI)

    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        return self._kernels.linear(x_TI, packed_OI, output_size, bias_O)

    def argmax(
        self, layer: LinearLayer, x_LI: Tensor, *, with_largest: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute without materialising the products."""
        assert self.packed_OI is not None, "argmax before process_weights_after_loading"
        assert layer.bias is None, "argmax ignores a bias"
        return self._kernels.greedy(x_LI, self.packed_OI, layer.output_size, with_largest=with_largest)


class NativeBfloat16Method(NativeMethod):
    """Penstock's C++ kernels in bfloat16 arithmetic: x is rounded to bfloat16, products are added in float32."""

    @property
    def _layout(self) -> Bfloat16Layout | None:
        return self._kernels.bfloat16_layout


@dataclass(frozen=True, slots=True)
class _PackedRows(RowLookup):
    kernels: NativeKernels
    packed_OI: Tensor

    def __call__(self, ids_T: Tensor) -> Tensor:
        return self.kernels.rows(ids_T, self.packed_OI)


def choose_linear_method(
    weight_OI: Tensor, compute_dtype: torch.dtype | None = None, cpu_arithmetic: str = "float32"
) -> LinearMethod:
    """Return the fastest method for this weight on its device.

    compute_dtype: None for the weight's. cpu_arithmetic: as in `ModelConfig`; a weight that bfloat16 arithmetic cannot
    take is multiplied in float32.
    """
    is_ours = is_on_cpu(weight_OI) and (compute_dtype or weight_OI.dtype) is torch.float32 and not uses_torch_products()
    if NATIVE is not None and is_ours:
        is_wanted = cpu_arithmetic == "bfloat16" or (cpu_arithmetic == "auto" and NATIVE.prefers_bfloat16)
        takes_pairs = weight_OI.dtype is torch.bfloat16 and weight_OI.shape[1] % 2 == 0
        return NativeBfloat16Method(NATIVE) if is_wanted and takes_pairs else NativeMethod(NATIVE)
    return OneDnnMethod() if packing_pays(weight_OI) else PlainMethod()


def process_weights_after_loading(
    model: nn.Module, choose: Callable[[LinearLayer], LinearMethod] | None = None
) -> None:
    """Choose a method for every linear layer and convert its weight, one layer at a time to limit peak memory.

    choose: instead of the fastest method, such as one that quantises.
    A model works without this call, but slower.
    """
    for module in model.modules():
        if isinstance(module, LinearLayer):
            own_method = module.own_method(NATIVE)
            if own_method is not None:
                module.method = own_method
            elif choose is None or module.keeps_precision:
                arithmetic = "float32" if module.keeps_precision else module.cpu_arithmetic
                module.method = choose_linear_method(module.weight, module.compute_dtype, arithmetic)
            else:
                module.method = choose(module)
            module.method.process_weights_after_loading(module)


def has_bfloat16_products(model: nn.Module) -> bool:
    """Whether some of the model's matrix products are in bfloat16 arithmetic."""
    return any(isinstance(method, NativeBfloat16Method) for method in _methods(model))


def describe_narrow_products(model: nn.Module) -> str | None:
    """Describe the arithmetic of products with 16-bit weights in a float32 computation; None without such products."""
    methods = _methods(model)
    if has_bfloat16_products(model):
        return f"products in bfloat16 arithmetic, added in float32, {describe_bfloat16_products()}"
    kept = [packed for method in methods if isinstance(method, NativeMethod) for packed in method.kept]
    return "products widen them" if any(packed.dtype.itemsize == 2 for packed in kept) else None


def _methods(model: nn.Module) -> list[LinearMethod]:
    return [module.method for module in model.modules() if isinstance(module, LinearLayer)]


def restore_weights(model: nn.Module) -> None:
    """Undo `process_weights_after_loading`: parameters hold their weights again and can be reloaded."""
    for module in model.modules():
        if isinstance(module, LinearLayer) and not isinstance(module.method, PlainMethod):
            module.method.restore_weights(module)
            module.method = PlainMethod()


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """Place of an adapter's matrices in a layer: of a whole layer, or of one shard of a fused one.

    first_output, num_outputs: the layer's outputs that they change. shape: of the whole weight, over all ranks.
    input_part, output_part: this rank's part of A's columns (dimension 1) and B's rows (dimension 0); None for all.
    """

    first_output: int
    num_outputs: int
    shape: tuple[int, int]
    input_part: Part | None = None
    output_part: Part | None = None


def weights_size_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers, in their present layout."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, LinearLayer) and isinstance(module.method, PackedMethod):
            tensors += module.method.kept
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class LinearLayer(WidensWeight):
    """x @ weight^T + bias.

    weight: [O, I]; empty while the method keeps it packed. bias: [O] or None.
    shares_weight: another module uses the weight as loaded. compute_dtype: dtype of x and of the product, where the
    weight has a narrower one. cpu_arithmetic: as in `ModelConfig`. tied_to: embeddings with the same weight, which can
    look up rows in packed form; in a tuple, since a module's attributes become its children. keeps_precision: the
    weight is never quantised, and its products are computed in float32. has_massive_inputs: trained models have inputs
    here that are hundreds of times the mean, so that errors of their weights count most. scalable_inputs: producer of
    the inputs, where it can scale them exactly; None elsewhere. has_smoothed_inputs: whether it has scaled
    them for quantisation. batch_invariant: rows of a product depend on no other rows, on a GPU too. adapters: LoRA
    adapters; None without. changes: counts the replacements of weight and bias; None without.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    keeps_precision = False
    cpu_arithmetic: str = "float32"
    batch_invariant = False
    tied_to: tuple[RowReader, ...] = ()
    has_massive_inputs = False
    scalable_inputs: ScalableInputs | None = None
    has_smoothed_inputs = False
    adapters: LinearAdapters | None = None
    changes: WeightChanges | None = None

    def __init__(self, input_size: int, output_size: int, *, bias: bool) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.method: LinearMethod = PlainMethod()
        self.weight = new_parameter(output_size, input_size)
        self.bias = new_parameter(output_size) if bias else None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self.changes is not None and name in ("weight", "bias", "method"):
            self.changes.count += 1

    def forward(self, x_TI: Tensor, context: ForwardContext) -> Tensor:
        """context: of the rows of x."""
        out_TO = self.method.apply(self, x_TI)
        return out_TO if self.adapters is None else self.adapters.add_to(out_TO, x_TI, context)

    def has_adapters(self, context: ForwardContext) -> bool:
        """Whether LoRA adapters may change the outputs of these rows."""
        return self.adapters is not None and self.adapters.apply_in(context)

    def loaded_weight(self) -> Tensor | None:
        """The weight as it was loaded, [O, I]; None for a quantised one."""
        return self.method.loaded_weight(self)

    def own_method(self, kernels: NativeKernels | None) -> LinearMethod | None:
        """The method of a layer that is not a plain product of rows; None for others. kernels: None without C++."""
        return None

    def adapter_place(self, shard: Shard | None) -> AdapterPlace:
        """Place of an adapter of this layer, or of one of its shards."""
        return AdapterPlace(0, self.output_size, (self.output_size, self.input_size))

    def drop_weight(self, lookup: RowLookup | None) -> None:
        """Free the weight, which the method keeps packed; `lookup` reads rows of the packed form."""
        if self.shares_weight or (self.tied_to and lookup is None):
            return
        self.weight = empty_like_weight(self.weight, self.compute_dtype)
        for embedding in self.tied_to:
            embedding.weight, embedding.lookup = self.weight, lookup

    def take_weight(self, weight_OI: Tensor) -> None:
        """Set the weight again."""
        self.weight = nn.Parameter(weight_OI, requires_grad=False)
        for embedding in self.tied_to:
            embedding.weight, embedding.lookup = self.weight, None
