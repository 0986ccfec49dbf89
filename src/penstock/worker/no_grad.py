"""`torch.no_grad()` for every step: the same switch, without the objects that torch makes to turn it."""

from __future__ import annotations

from types import TracebackType

import torch


class NoGrad:
    """A context that can be entered again and again, but not within itself."""

    __slots__ = ("_was_enabled",)

    def __init__(self) -> None:
        self._was_enabled = True

    def __enter__(self) -> None:
        self._was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch._C._set_grad_enabled(self._was_enabled)
