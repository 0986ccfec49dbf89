"""Workers: device, memory plan, model loading and execution of one rank.

Names load on first use, since the memory plan must not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.worker.base import WorkerBase
    from penstock.worker.wrapper import WorkerWrapperBase

__all__ = ["WorkerBase", "WorkerWrapperBase"]

_HOMES = {"WorkerBase": "penstock.worker.base", "WorkerWrapperBase": "penstock.worker.wrapper"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.worker' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
