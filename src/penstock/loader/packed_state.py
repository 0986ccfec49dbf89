"""Packed state: a model's weights as they are in memory, and what is needed to build the same layers around them.

A header describes the layers: the linear method of each, the format of its weight, and the kernels whose layout it has.
A model is restored without quantising, packing or calibrating, with the same bits. For other kernels of a CPU its
weights are repacked. Tensors have the paths of `layers.tensors_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from penstock.config import ModelConfig
from penstock.config.model import NO_QUANTIZATION
from penstock.device.huge_pages import weight_memory
from penstock.device.operator_sizes import META
from penstock.device.stand_in import standing_for
from penstock.errors import CheckpointError, ConfigError, UnsupportedFeature
from penstock.kernels.native import NATIVE, NativeKernels, load_native_kernels
from penstock.kernels.native.quantized import available_quantized_products
from penstock.kernels.quantized import QuantizedProducts, QuantizedShape, QuantizedWeight, TorchQuantizedProducts
from penstock.layers.linear import (
    LinearLayer,
    OneDnnMethod,
    PackedMethod,
    PlainMethod,
    choose_linear_method,
)
from penstock.layers.quantization.float8 import Float8Method
from penstock.layers.quantization.method import (
    Int4ResidualMethod,
    QuantizedMethod,
    Quantizer,
    ReorderedMethod,
    products_on,
)
from penstock.layers.tensors_of import tensors_of
from penstock.loader.kv_cache_scales import scales_of_state
from penstock.loader.packed_header import (
    LAYOUT_VERSION,
    NATIVE_METHODS,
    QUANTIZED_METHODS,
    TORCH,
    Float8Entry,
    FloatName,
    FormOfWeight,
    Kernels,
    LayerEntry,
    PackedEntry,
    PackedHeader,
    QuantizedEntry,
)
from penstock.models.causal_lm import CausalLM
from penstock.models.registry import runs_through_transformers


@dataclass(frozen=True, slots=True)
class PackedState:
    """header: None of a sharded state of floats. tensors: by path; scales of an FP8 KV cache by the names of a sharded
    state. in_place: names of tensors whose memory a model takes as it is; it copies the others.
    """

    header: PackedHeader | None
    tensors: Mapping[str, Tensor]
    in_place: Container[str] = frozenset()

    def place(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The memory that a parameter takes as it is; None for one that is copied."""
        if name not in self.in_place or self.tensors[name].dtype is not dtype:
            return None
        return self.tensors[name]

    @classmethod
    def of(cls, model: CausalLM, config: ModelConfig, device: str, dtypes: tuple[str, str]) -> PackedState:
        """Describe a loaded model, whose memory the tensors are. dtypes: of the computation, and of matrices.

        Raises UnsupportedFeature for layers that are not Penstock's.
        """
        if runs_through_transformers(config):
            raise UnsupportedFeature(
                "A packed state of a model that runs through Transformers is not supported. Load its checkpoint."
            )
        layers = {name: module for name, module in model.named_modules() if isinstance(module, LinearLayer)}
        header = PackedHeader(
            version=LAYOUT_VERSION,
            kernels=Kernels.here(device),
            quantization=config.quantization,
            dtype=cast(FloatName, dtypes[0]),
            weights_dtype=cast(FloatName, dtypes[1]),
            is_tied=bool(model.tied_weights()),
            layers={name: _described(name, layer) for name, layer in layers.items()},
        )
        buffers = {name for name, _ in model.named_buffers()} & set(model.state_dict(keep_vars=True))
        tensors = {
            one.path: _whole_rows(one.tensor.detach())
            for one in tensors_of(model)
            if (one.is_weight or one.path in buffers) and not one.tensor.is_mkldnn
        }
        for name, layer in layers.items():
            if isinstance(layer.method, OneDnnMethod) and layer.weight.numel() == 0:
                weight_OI = layer.loaded_weight()
                assert weight_OI is not None, "of floats"
                tensors[f"{name}.weight"] = weight_OI
        return cls(header, tensors | scales_of_state(model))


def is_quantized_model(model: nn.Module) -> bool:
    """Whether a layer's weight is quantised, so that the model's parameters are not all of it."""
    methods = [module.method for module in model.modules() if isinstance(module, LinearLayer)]
    return any(isinstance(method, QuantizedMethod | Float8Method) for method in methods)


def layouts_of(header: PackedHeader, config: ModelConfig, device: str) -> Layouts | None:
    """Return the layouts that a state's weights have; None for those of here.

    Raises CheckpointError for another device, or unknown kernels, ConfigError for another quantisation.
    """
    wanted = config.quantization
    if wanted is not None and wanted != (header.quantization or NO_QUANTIZATION):
        raise ConfigError(
            f"quantization={wanted!r} is not valid for packed weights that were made with "
            f"quantization={header.quantization!r}. Leave the option out, or load the checkpoint."
        )
    here, there = Kernels.here(device), header.kernels
    if there == here:
        return None
    products: dict[str, QuantizedProducts] = {one.name: one for one in available_quantized_products()}
    products[TORCH] = TorchQuantizedProducts()
    try:
        floats = load_native_kernels(there.floats)
    except ConfigError:
        floats = None
    if there.device != device or there.integers not in products or (floats is None and there.floats != TORCH):
        raise CheckpointError(
            f"The packed weights are for {there.device} with the kernels {there.floats} and {there.integers}, which "
            f"are not available here ({here.device}, {here.floats}, {here.integers}). Load the checkpoint that they "
            "were made from."
        )
    return Layouts(floats, products[there.integers])


@dataclass(frozen=True, slots=True)
class Layouts:
    """Kernels of other layouts. floats: None without such weights. integers: of quantised weights."""

    floats: NativeKernels | None
    integers: QuantizedProducts


def check_layers(layers: Mapping[str, LinearLayer], entries: Mapping[str, LayerEntry]) -> None:
    """Raise CheckpointError unless a header has entries of exactly these layers."""
    if differing := sorted(layers.keys() ^ entries.keys()):
        raise CheckpointError(
            f"The packed weights are of another model, or another version of Penstock: {len(differing)} linear layers "
            f"differ, such as {differing[0]}. Load the checkpoint that they were made from, and save them again."
        )


class PackedLayers:
    """Linear layers of a model on the meta device, by the header of a state.

    late: ids of parameters that need no memory, since a method has the weight. Raises CheckpointError for a header that
    does not describe this model.
    """

    def __init__(self, model: CausalLM, state: PackedState, kind: str, layouts: Layouts | None) -> None:
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, LinearLayer)}
        assert state.header is not None, "of packed weights"
        self._entries: Mapping[str, LayerEntry] = state.header.layers
        self._model, self._kind, self._layouts = model, kind, layouts
        self._in_place = state.in_place
        check_layers(self._layers, self._entries)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        stored = {id(parameters[name]) for name in state.tensors if name in parameters}
        weights = {
            id(layer.weight) for name, layer in self._layers.items() if isinstance(self._entries[name], PackedEntry)
        }
        self.late = weights - stored

    def fill(
        self, tensors: dict[str, Tensor], device: torch.device, finished: Callable[[LinearLayer], None] | None = None
    ) -> None:
        """Read all weights, which are taken out of `tensors`: parameters, buffers, and packed weights.

        finished: called with each layer whose weight is in its final form.
        Raises CheckpointError for a missing tensor, or one of another shape.
        """
        state = self._model.state_dict(keep_vars=True)
        passed = set(self.late)
        for name, target in state.items():
            if id(target) not in passed:
                passed.add(id(target))
                stored = _taken(tensors, name)
                if stored.shape != target.shape:
                    raise _of_other_shape(name, stored, target)
                if stored.data_ptr() != target.data_ptr():
                    target.detach().copy_(stored)
        for name, layer in self._layers.items():
            entry = self._entries[name]
            if isinstance(entry, PackedEntry):
                self._fill_layer(name, layer, entry, tensors, device)
            elif entry.method == OneDnnMethod.__name__:
                layer.method = choose_linear_method(layer.weight, layer.compute_dtype)
                layer.method.process_weights_after_loading(layer)
            if finished is not None:
                finished(layer)

    def _fill_layer(
        self, name: str, layer: LinearLayer, entry: PackedEntry, tensors: dict[str, Tensor], device: torch.device
    ) -> None:
        layer.has_smoothed_inputs = entry.is_smoothed
        stored = {attribute: _taken(tensors, f"{name}.method.{attribute}") for attribute in entry.tensors}
        method, forms = form_of(entry, layer, stored, self._kind, None)
        if self._layouts is not None:
            old, old_forms = form_of(entry, layer, stored, self._kind, self._layouts)
            stored = _repacked(old, method, layer, in_forms(name, stored, old_forms, device))
        read = in_forms(name, stored, forms, device, self._in_place)
        if id(layer.weight) in self.late or layer.weight.is_meta:
            dtype = layer.compute_dtype or layer.weight.dtype
            layer.take_weight(torch.empty(0, dtype=dtype, device=device))
        layer.method = method
        method.adopt(layer, read)


def form_of(
    entry: PackedEntry, layer: LinearLayer, stored: Mapping[str, Tensor], kind: str, layouts: Layouts | None
) -> tuple[PackedMethod, dict[str, Tensor]]:
    """Make a layer's method; return it, and meta tensors of its weight's form.

    stored: tensors of the method. kind: of the device. layouts: None for those of here.
    """
    size = layer.output_size, layer.input_size
    with standing_for(kind):
        method = _method(entry, layer, stored, kind, layouts)
        method.packed_OI = method.pack(torch.empty(size, dtype=getattr(torch, entry.dtype)))
    return method, _tensors_in(method)


def in_forms(
    name: str,
    stored: Mapping[str, Tensor],
    forms: Mapping[str, Tensor],
    device: torch.device,
    in_place: Container[str] = frozenset(),
) -> dict[str, Tensor]:
    """Copy the stored tensors of a layer's method into memory of their own, in these forms.

    in_place: paths of those that stay where they are. Raises CheckpointError for tensors in other forms.
    """
    read = {}
    if differing := sorted(stored.keys() ^ forms.keys()):
        raise CheckpointError(
            f"The packed weights have {name} with other tensors than its method, such as {differing[0]}. They are "
            "damaged. Save them again."
        )
    for attribute, form in forms.items():
        path, tensor = f"{name}.method.{attribute}", stored[attribute]
        _check(path, tensor, form)
        if device == META:
            read[attribute] = form
        else:
            read[attribute] = _in_form(tensor if path in in_place else _in_memory(tensor, device), form)
    return read


def tensors_of_method(method: PackedMethod) -> dict[str, Tensor]:
    """Tensors of a packed weight by attribute, as a state has them."""
    return {key: _whole_rows(tensor) for key, tensor in _tensors_in(method).items()}


def _tensors_in(method: PackedMethod) -> dict[str, Tensor]:
    return {key: value for key, value in vars(method).items() if isinstance(value, Tensor)}


def _method(
    entry: PackedEntry, layer: LinearLayer, stored: Mapping[str, Tensor], kind: str, layouts: Layouts | None
) -> PackedMethod:
    kernels = NATIVE if layouts is None else layouts.floats
    name = entry.method
    if isinstance(entry, QuantizedEntry):
        shape = QuantizedShape(
            output_size=layer.output_size, input_size=layer.input_size, **msgspec.structs.asdict(entry.shape)
        )
        products = products_on(kind, is_invariant=layer.batch_invariant) if layouts is None else layouts.integers
        if name == ReorderedMethod.__name__:
            return ReorderedMethod(_form_of(shape), torch.empty(layer.input_size, dtype=torch.int64), products)
        return (Int4ResidualMethod if name == Int4ResidualMethod.__name__ else QuantizedMethod)(
            _form_of(shape), products
        )
    if isinstance(entry, Float8Entry):
        return Float8Method(torch.empty_like(stored["_scales_OC"], device=META), entry.block_size)
    if kernels is not None and name in NATIVE_METHODS:
        return NATIVE_METHODS[name](kernels)
    own = layer.own_method(kernels)
    if isinstance(own, PackedMethod) and name == type(own).__name__:
        return own
    raise CheckpointError(
        f"The packed weights have a layer of the method {name}, which is not available here. Load the checkpoint that "
        "they were made from."
    )


@lru_cache(maxsize=64)
def _form_of(shape: QuantizedShape) -> Quantizer:
    """Quantiser of meta tensors to a shape."""

    def quantize(weight_OI: Tensor) -> QuantizedWeight:
        groups_OG = weight_OI.new_empty(shape.output_size, shape.num_groups, dtype=torch.float32)
        values_OI = weight_OI.new_empty(weight_OI.shape, dtype=torch.int8)
        return QuantizedWeight(shape, values_OI, groups_OG, groups_OG if shape.has_minimums else None)

    return quantize


def _repacked(
    old: PackedMethod, new: PackedMethod, layer: LinearLayer, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert packed tensors from one layout to another, through the weight itself; bit for bit."""
    if isinstance(old, QuantizedMethod) and isinstance(new, QuantizedMethod):
        return {
            name: new.packed(old.unpacked(tensor)) if tensor.dtype is torch.uint8 else tensor
            for name, tensor in stored.items()
        }
    for name, tensor in stored.items():
        setattr(old, name, tensor)
    new.packed_OI = new.pack(old.unpack(stored["packed_OI"], layer.output_size))
    return tensors_of_method(new)


def _described(name: str, layer: LinearLayer) -> LayerEntry:
    """Describe a layer's method, and the format of its weight."""
    method = layer.method
    kind = type(method).__name__
    if type(method) in (PlainMethod, OneDnnMethod):
        return LayerEntry(method=kind, is_smoothed=layer.has_smoothed_inputs)
    known = (*NATIVE_METHODS.values(), *QUANTIZED_METHODS.values(), Float8Method, type(layer.own_method(NATIVE)))
    if type(method) not in known or not isinstance(method, PackedMethod) or method.packed_OI is None:
        raise UnsupportedFeature(
            f"{name} has the linear method {kind}, of which no packed state can be saved. Load the checkpoint instead."
        )
    packed = method.packed_OI
    dtype = "float32"
    if not isinstance(method, QuantizedMethod | Float8Method):
        # Else pairs of bfloat16 values.
        dtype = str(packed.dtype if packed.is_floating_point() else torch.bfloat16).removeprefix("torch.")
    entry = PackedEntry(
        method=kind,
        is_smoothed=layer.has_smoothed_inputs,
        tensors=list(_tensors_in(method)),
        dtype=cast(FloatName, dtype),
    )
    if isinstance(method, QuantizedMethod):
        assert method.shape is not None, "is packed"
        fields = {key: getattr(method.shape, key) for key in FormOfWeight.__struct_fields__}
        return QuantizedEntry(**msgspec.structs.asdict(entry), shape=FormOfWeight(**fields))
    if isinstance(method, Float8Method):
        return Float8Entry(**msgspec.structs.asdict(entry), block_size=method.block_size)
    return entry


def _whole_rows(tensor: Tensor) -> Tensor:
    """A contiguous tensor of all memory of the rows, which kernels read beyond the last column."""
    if tensor.is_contiguous() or tensor.dim() != 2 or tensor.stride(1) != 1 or tensor.stride(0) < tensor.shape[1]:
        return tensor.contiguous()
    rows, width = tensor.shape[0], tensor.stride(0)
    return tensor.as_strided((rows, width), (width, 1))


def _check(path: str, stored: Tensor, form: Tensor) -> None:
    """Raise CheckpointError unless a stored tensor has a form, or that of whole rows."""
    if stored.dtype is not form.dtype or stored.shape not in (form.shape, (form.shape[0], form.stride(0))):
        raise _of_other_shape(path, stored, form)


def _in_memory(stored: Tensor, device: torch.device) -> Tensor:
    """Copy a stored tensor into memory of its own."""
    size = stored.numel() * stored.element_size()
    memory = weight_memory(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)
    memory.copy_(stored.contiguous().view(-1).view(torch.uint8))
    return memory.view(stored.dtype).view(stored.shape)


def _in_form(whole: Tensor, form: Tensor) -> Tensor:
    """View a tensor of whole rows in its form."""
    return whole if whole.shape == form.shape else whole[:, : form.shape[1]]


def _of_other_shape(path: str, stored: Tensor, wanted: Tensor) -> CheckpointError:
    return CheckpointError(
        f"The packed weights have {path} as {stored.dtype} {list(stored.shape)}, but the model needs {wanted.dtype} "
        f"{list(wanted.shape)}. They are damaged, or of another model. Save them again."
    )


def _taken(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise CheckpointError(
            f"The packed weights lack {name}. They are damaged, or of another model. Save them again."
        )
    return tensors.pop(name)
