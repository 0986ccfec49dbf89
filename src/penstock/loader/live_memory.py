"""Memory of a live model, into which weights are loaded in place: addresses stay, so programs and graphs stay valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.layers.attention import Attention
from penstock.layers.linear import LinearLayer, LinearMethod, PackedMethod, PlainMethod
from penstock.layers.tensors_of import tensors_of
from penstock.models.causal_lm import CausalLM

_SHOWN = 4


class LiveMemory:
    """Memory of a model for another one of the same layout, which the loader builds without memory.

    Parameters are filled where they are; a linear layer's weight is packed or quantised beside its place, and copied
    once it is complete.
    moved: whether a layer got other memory, since its weight has another format than before.
    """

    def __init__(self, live: CausalLM) -> None:
        self._live = live
        self.moved = False
        self._modules = dict(live.named_modules())
        self._tensors: dict[str, Tensor] = {
            f"{path}.{name}" if path else name: tensor
            for path, module in self._modules.items()
            for name, tensor in (module._parameters | module._buffers).items()
            if tensor is not None
        }
        self._layers: dict[int, LinearLayer] = {}
        # Attention layers of the model without memory, each with the live one.
        self._attentions: list[tuple[Attention, Attention]] = []

    def check(self, model: CausalLM) -> None:
        """Pair the layers of a model without memory with those of the live one. Raises ModelError if they differ."""
        modules = dict(model.named_modules())
        before, after = _layout_of(self._live, self._modules), _layout_of(model, modules)
        differences = [
            f"{name} (was {before.get(name, 'not there')}, would be {after.get(name, 'not there')})"
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        ]
        if differences:
            raise ModelError(
                f"These weights are of another shape than those that serve: {'; '.join(differences[:_SHOWN])} "
                f"({len(differences)} differences in all). Create a new engine for them."
            )
        self._layers, self._attentions = {}, []
        for name, module in modules.items():
            live = self._modules.get(name)
            if isinstance(module, LinearLayer):
                assert isinstance(live, LinearLayer), "layouts are equal"
                self._layers[id(module)] = live
            elif isinstance(module, Attention) and isinstance(live, Attention):
                self._attentions.append((module, live))

    def parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        """The memory of a parameter or buffer."""
        tensor = self._tensors[name].detach()
        assert tensor.dtype is dtype, f"{name} is {tensor.dtype}, not {dtype}"
        return tensor

    def takes_pieces(
        self, layer: LinearLayer, method: LinearMethod, pieces: Iterable[tuple[int, int]], sample_RI: Tensor
    ) -> bool:
        """Whether rows of a layer's weight (the first one, and their number) can be packed piece by piece.

        method: of the layer, before it packs. sample_RI: some rows, in the dtype in which they come.
        """
        live = self._layers[id(layer)].method
        if not isinstance(live, PackedMethod) or live.packed_OI is None:
            return False
        return all(live.takes_rows(method, sample_RI, begin, num_rows) for begin, num_rows in pieces)

    def take_piece(self, layer: LinearLayer, rows_RI: Tensor, begin: int) -> bool:
        """Pack rows into their place. Returns whether their values fit the form of the weight."""
        live = self._layers[id(layer)].method
        assert isinstance(live, PackedMethod), "takes_pieces"
        return live.replace_rows(rows_RI, begin)

    def lend(self, layer: LinearLayer, method: LinearMethod) -> None:
        """Let a layer's weight be packed where it belongs, if its method can do so."""
        live = self._layers[id(layer)].method
        if isinstance(method, PackedMethod) and isinstance(live, PackedMethod) and type(live) is type(method):
            method.pack_into(live)

    def take(self, layer: LinearLayer) -> None:
        """Move a complete layer's weight to its place, and free the layer."""
        live = self._layers[id(layer)]
        if _format(layer) == _format(live):
            for made, kept in zip(tensors_of(layer), tensors_of(live), strict=True):
                if made.tensor.data_ptr() != kept.tensor.data_ptr():
                    kept.tensor.detach().copy_(made.tensor)
        else:
            self.moved = True
            # The layer's own weight is memory that the next layer may get.
            live.method, live.weight = layer.method, nn.Parameter(layer.weight.clone(), requires_grad=False)
            for own, other in zip(live.tied_to, layer.tied_to, strict=True):
                own.weight, own.lookup = live.weight, other.lookup
        layer.method = PlainMethod()
        layer.take_weight(torch.empty(0))

    def finish(self) -> None:
        """Take over what loading has set beside tensors: scales of an FP8 KV cache."""
        for module, live in self._attentions:
            scales = module.layer.cache_scales
            if scales is not None and live.layer.cache_scales != scales:
                live.layer = replace(live.layer, cache_scales=scales)
                self.moved = True


def _layout_of(model: CausalLM, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Sizes of linear layers, and shapes of other parameters, by name. modules: all of the model, by name."""
    ties = sorted(model.tied_weights())
    layout = {"tied weights": ", ".join(ties)} if ties else {}
    packed = [layer for layer in modules.values() if isinstance(layer, LinearLayer)]
    without_weight = {id(module) for layer in packed for module in (layer, *layer.tied_to)}
    for name, module in modules.items():
        if isinstance(module, LinearLayer):
            layout[f"{name}.weight"] = f"[{module.output_size}, {module.input_size}]"
        for kind, parameter in module._parameters.items():
            if parameter is not None and (kind != "weight" or id(module) not in without_weight):
                layout[f"{name}.{kind}"] = str(list(parameter.shape))
    return layout


def _format(layer: LinearLayer) -> object:
    """Layout of a layer's tensors; they can be copied between layers whose layouts are equal."""
    tensors = tensors_of(layer)
    if any(one.tensor.is_mkldnn for one in tensors):
        return object()  # has no memory to copy into
    shape = getattr(layer.method, "shape", None)
    return type(layer.method), shape, [(one.path, one.tensor.shape, one.tensor.dtype) for one in tensors]
