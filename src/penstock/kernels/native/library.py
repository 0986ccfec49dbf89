"""Access to the built C++ module, and argument memory of repeated calls."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

from penstock.device.stand_in import stands_for_cpu

# Functions of sizes only, without addresses.
_TAKES_NO_ADDRESS = (
    "instruction_sets",
    "multiply_tiles_alike",
    "has_fast_pairs",
    "why_no_tiles",
    "operation_types",
    "operation_bytes",
    "quantized_instruction_sets",
    "quantized_packed_bytes",
    "collective_bytes",
    "channel_bytes",
)


class Library:
    """The functions of the built module. Calls with addresses are skipped for meta tensors: the callers allocate all
    results in Python.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._module, name)
        if name not in _TAKES_NO_ADDRESS:
            function = _with_memory(function)
        # Later lookups find the attribute and skip this method.
        setattr(self, name, function)
        return function

    def bind(self, name: str) -> Callable[..., Any]:
        """A function for objects made now, whose tensors have memory in all calls or in none."""
        function: Callable[..., Any] = _skip if stands_for_cpu() else getattr(self._module, name)
        return function


def _with_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return 0 if stands_for_cpu() else function(*arguments)

    return call


def _skip(*_: Any) -> int:
    return 0


class StoredArguments:
    """An int64 array in memory, for a call that takes its address."""

    __slots__ = ("_values", "address")

    def __init__(self, values: Iterable[int]) -> None:
        self._values = array("q", values)
        self.address: int = self._values.buffer_info()[0]
