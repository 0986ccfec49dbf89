"""Devices: memory, threads, copies, events and dtypes behind one interface.

Names load on first use, because parts without torch (limits, dtypes) must not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.device.base import CellWrites, Device, MemorySnapshot, PendingCopy
    from penstock.device.dtypes import DtypeChoice
    from penstock.device.select import create_device

__all__ = ["CellWrites", "Device", "DtypeChoice", "MemorySnapshot", "PendingCopy", "create_device"]

_HOMES = {
    "CellWrites": "penstock.device.base",
    "Device": "penstock.device.base",
    "DtypeChoice": "penstock.device.dtypes",
    "MemorySnapshot": "penstock.device.base",
    "PendingCopy": "penstock.device.base",
    "create_device": "penstock.device.select",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.device' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
