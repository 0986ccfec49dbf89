"""Executors: one worker in this process, a process per rank, or Ray actors.

Names load on first use, since a worker process sets its environment before it imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.executor.base import Executor, StepHandle
    from penstock.executor.multiprocess import MultiprocessExecutor
    from penstock.executor.select import create_executor
    from penstock.executor.uni import UniProcExecutor

__all__ = ["Executor", "MultiprocessExecutor", "StepHandle", "UniProcExecutor", "create_executor"]

_HOMES = {
    "Executor": "base",
    "StepHandle": "base",
    "MultiprocessExecutor": "multiprocess",
    "UniProcExecutor": "uni",
    "create_executor": "select",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.executor' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.executor.{_HOMES[name]}"), name)
