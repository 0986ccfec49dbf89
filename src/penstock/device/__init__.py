"""What differs between machines: memory, threads, copies, events, dtypes. The runner sees only this interface."""

from penstock.device.base import Device, DtypeChoice, MemorySnapshot, PendingCopy
from penstock.device.select import create_device

__all__ = ["Device", "DtypeChoice", "MemorySnapshot", "PendingCopy", "create_device"]
