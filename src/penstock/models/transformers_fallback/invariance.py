"""Operators whose rows do not depend on each other, in place of those of torch that do.

On a CPU torch's products of matrices add up in an order that depends on the number of rows, and some of its elementwise
functions have other bits in whole vectors than in the elements that are left over, so a token's bits would depend on
the rest of its batch. The modules whose own code calls such an operator run with these instead; linear layers and
experts are replaced by the library's.

Suffixes: I input features, O output features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.device.stand_in import is_on_cpu
from penstock.kernels.activation import gelu, gelu_tanh, sigmoid, silu
from penstock.kernels.native import NATIVE

_Operator = Callable[..., Any]


class OperatorWatch:
    """Modules whose own code calls an operator of `_INVARIANT`, found in a run of the model."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self._running: list[nn.Module] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(lambda module, _: self._running.append(module)))
            handles.append(module.register_forward_hook(lambda *_: self._leave()))
        try:
            with _Recorder(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def called(self, operator: _Operator) -> None:
        if operator in _INVARIANT and self._running and not any(self._running[-1] is one for one in self.modules):
            self.modules.append(self._running[-1])

    def _leave(self) -> None:
        self._running.pop()


class _Recorder(TorchFunctionMode):
    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: _Operator, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._watch.called(func)
        return func(*args, **(kwargs or {}))


class PackedWeights(nn.Module):
    """Packed weights of one model's operators, as buffers, so that they count as its memory."""

    def __init__(self) -> None:
        super().__init__()
        # Names of buffers by id of the parameter, which the model keeps alive.
        self._names: dict[int, str] = {}

    def of(self, weight: Tensor) -> Tensor | None:
        name = self._names.get(id(weight))
        return None if name is None else self._buffers[name]

    def keep(self, weight: nn.Parameter, packed: Tensor) -> None:
        name = self._names[id(weight)] = str(len(self._names))
        self.register_buffer(name, packed, persistent=False)

    def clear(self) -> None:
        for name in self._names.values():
            delattr(self, name)
        self._names.clear()


class RowInvariant(TorchFunctionMode):
    """Replaces operators inside the block by those of `_INVARIANT`.

    packed: weights of the model as these have packed them, each at its first use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed = PackedWeights()

    def __torch_function__(
        self, func: _Operator, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = _INVARIANT.get(func)
        result = NotImplemented if replacement is None else replacement(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result

    def install(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Let these modules, where they are still part of the model, run inside such a block."""
        present = set(model.modules())
        for module in modules:
            if module in present:
                module.forward = self._around(module.forward)

    def linear(self, x: Tensor, weight: Tensor, bias_O: Tensor | None, *, is_transposed: bool = False) -> Any:
        """x @ weight^T + bias with a weight [O, I], or [I, O] if it is transposed."""
        if NATIVE is None or x.dim() < 2 or weight.dim() != 2 or not (_is_ours(x) and _is_ours(weight)):
            return NotImplemented
        packed = self.packed.of(weight)
        if packed is None:
            with torch.inference_mode(False):  # it may be written to in any mode later
                packed = NATIVE.pack_weight((weight.t() if is_transposed else weight).detach())
            if isinstance(weight, nn.Parameter):
                self.packed.keep(weight, packed)
        return NATIVE.linear(x, packed, weight.shape[1 if is_transposed else 0], bias_O)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run


def _elementwise(function: Callable[[Tensor], Tensor]) -> _Operator:
    """A replacement by a function of matrices, for an operator that takes any tensor."""

    def replacement(_mode: RowInvariant, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(args) or any(kwargs.values()) or not _is_ours(x) or x.dim() == 0:
            return NotImplemented
        return function(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)

    return replacement


def _gelu(mode: RowInvariant, x: Tensor, approximate: str = "none") -> Any:
    return (_GELU_TANH if approximate == "tanh" else _GELU)(mode, x)


def _softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def _linear(mode: RowInvariant, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return mode.linear(input, weight, bias)


def _matmul(mode: RowInvariant, input: Tensor, other: Tensor) -> Any:
    return mode.linear(input, other, None, is_transposed=True)


def _addmm(mode: RowInvariant, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if input.dim() != 1 or beta != 1 or alpha != 1:
        return NotImplemented
    return mode.linear(mat1, mat2, input, is_transposed=True)


def _is_ours(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32 and is_on_cpu(x)


_GELU, _GELU_TANH, _SIGMOID = _elementwise(gelu), _elementwise(gelu_tanh), _elementwise(sigmoid)
_INVARIANT: dict[_Operator, _Operator] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm), _matmul),
    torch.addmm: _addmm,
    F.silu: _elementwise(silu),
    F.gelu: _gelu,
    **dict.fromkeys((F.sigmoid, torch.sigmoid, Tensor.sigmoid), _SIGMOID),
    F.softplus: _elementwise(_softplus),
}
