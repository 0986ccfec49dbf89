"""How modules become a program: each records the kernels that its forward would call.

A module that can be recorded has a method `record` beside its `forward`, which does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from penstock.attention import BoundLayer
from penstock.kernels.native.program import NativeProgram


class Unrecordable(Exception):
    """Why a module cannot be recorded."""


class Recorder:
    """program: what is recorded so far. layers: the attention layers' caches, by name."""

    def __init__(self, program: NativeProgram, layers: Mapping[str, BoundLayer]) -> None:
        self.program = program
        self.layers = layers

    def record(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`module.record(self, ...)`.

        Raises Unrecordable for a module that has none, that has a forward of another class than its `record`, or
        whose forward does more than its class says.
        """
        _require_own(module, "record", ("forward",))
        return module.record(self, *args, **kwargs)  # type: ignore[operator]

    def record_greedy(self, module: nn.Module, *args: Any) -> None:
        """`module.record_greedy(self, ...)`, which ends in the choice of a token.

        Raises Unrecordable as `record` does, for all that such a module has to do with that choice.
        """
        _require_own(module, "record_greedy", ("forward", "compute_logits", "compute_greedy"))
        module.record_greedy(self, *args)  # type: ignore[operator]


def _require_own(module: nn.Module, recorded: str, methods: Sequence[str]) -> None:
    owner = _owner(module, recorded)
    others = {_owner(module, method) for method in methods} - {owner, None}
    if owner is None or others or any(method in vars(module) for method in methods):
        raise Unrecordable(f"{type(module).__name__} runs in Python")
    if module._forward_hooks or module._forward_pre_hooks:
        raise Unrecordable(f"a hook was registered on a {type(module).__name__}")


def _owner(module: nn.Module, method: str) -> type | None:
    return next((base for base in type(module).__mro__ if method in vars(base)), None)
