"""Walk over the tensors of a model, in the layout that they have in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.layers.linear import LinearMethod

# Attributes that are no part of a model's layout: registries of `nn.Module`, walked one by one, and LoRA adapters.
_SKIPPED = frozenset(vars(nn.Module())) | {"adapters"}


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a model.

    path: attributes and indices that lead to it, such as `model.layers.0.mlp.down_proj.method.packed_OI`.
    is_weight: whether its values come from the checkpoint, as a parameter or in the layout of a linear method; others
    are computed from the configuration, such as rotary tables, or count what the engine does.
    """

    path: str
    tensor: Tensor
    is_weight: bool

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def tensors_of(model: nn.Module) -> list[ModelTensor]:
    """Return all tensors of a model that have memory, each memory once, in an order that depends on its class alone.

    First the weights. Modules of other models that it refers to, such as a draft head to its target's embedding, belong
    to those.
    """
    modules = dict(model.named_modules())
    walk = _Walk({id(module) for module in modules.values()})
    weights = [
        ModelTensor(path, tensor, is_weight=True)
        for name, module in modules.items()
        for path, tensor in walk.weights(module, f"{name}." if name else "")
    ]
    others = [
        ModelTensor(path, tensor, is_weight=False)
        for name, module in modules.items()
        for path, tensor in walk.others(module, f"{name}." if name else "")
    ]
    return weights + others


class _Walk:
    """Walk that passes each object, and each range of memory, once. modules: ids of the model's own."""

    def __init__(self, modules: set[int]) -> None:
        self._passed = modules
        self._ranges: dict[int, list[range]] = {}

    def weights(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Parameters of a module, and the tensors of its linear method."""
        yield from self._items(module._parameters, prefix)
        method = vars(module).get("method")
        if isinstance(method, LinearMethod):
            yield from self._below(method, f"{prefix}method")

    def others(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Buffers of a module, and tensors below its other attributes."""
        yield from self._items(module._buffers, prefix)
        yield from self._items({name: value for name, value in vars(module).items() if name not in _SKIPPED}, prefix)

    def _items(self, values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, value in values.items():
            yield from self._below(value, f"{prefix}{name}")

    def _below(self, value: object, path: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, Tensor):
            if self._is_new(value):
                yield path, value
            return
        is_record = isinstance(value, LinearMethod) or dataclasses.is_dataclass(value)
        if isinstance(value, nn.Module | type) or not (is_record or isinstance(value, list | tuple | dict)):
            return
        if id(value) in self._passed:
            return
        self._passed.add(id(value))
        if isinstance(value, dict):
            yield from self._items({str(key): item for key, item in value.items()}, f"{path}.")
        elif isinstance(value, list | tuple):
            yield from self._items({str(index): item for index, item in enumerate(value)}, f"{path}.")
        else:
            yield from self._items(_attributes(value), f"{path}.")

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor has memory that none before it has."""
        if tensor.numel() == 0:
            return False
        if tensor.is_mkldnn:  # no storage
            storage, memory = id(tensor), range(1)
        else:
            storage, begin = tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()
            span = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True)) + 1
            memory = range(begin, begin + span * tensor.element_size())
        passed = self._ranges.setdefault(storage, [])
        if any(memory.start >= other.start and memory.stop <= other.stop for other in passed):
            return False
        passed.append(memory)
        return True


def _attributes(value: object) -> dict[str, object]:
    """Attributes of an object with or without `__dict__`."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return vars(value)
