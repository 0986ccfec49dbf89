"""Launches of torch operators and Triton kernels: each costs host time on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

# Operators that launch no kernel.
_FREE = {"empty", "new_empty", "empty_like", "lift_fresh"}


class Launches(TorchDispatchMode):
    """names: of operators, and of kernels such as "triton _merge_parts", in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if not function.is_view and name not in _FREE:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def counted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Count the launches of the block, whose kernels Triton's interpreter runs."""
    launches, run = Launches(), InterpretedFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.names.append(f"triton {self.__name__}")
        return uncounted(run)(self, *args, **kwargs)

    with monkeypatch.context() as patched, launches:
        patched.setattr(InterpretedFunction, "run", counted)
        yield launches


def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, without a count of its operators."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call
