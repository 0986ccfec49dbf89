"""The one way from Python into the C++ library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.device.stand_in import stands_for_cpu

# What needs no tensor, but only sizes.
_TAKES_NO_ADDRESS = (
    "instruction_sets",
    "operation_types",
    "quantized_instruction_sets",
    "quantized_packed_bytes",
    "collective_bytes",
    "channel_bytes",
)


class Library:
    """The functions of the built module. They are not called for tensors that have no memory: those give addresses
    at which there is nothing, and all results are made by the callers, in Python.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._module, name)
        if name not in _TAKES_NO_ADDRESS:
            function = _with_memory(function)
        # Found without this method from now on.
        setattr(self, name, function)
        return function


def _with_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return 0 if stands_for_cpu() else function(*arguments)

    return call
