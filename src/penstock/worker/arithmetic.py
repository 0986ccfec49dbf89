"""Arithmetic of a worker, as a text to compare with that of other workers."""

from __future__ import annotations

from penstock.kernels.native import describe_kernels
from penstock.worker.base import WorkerBase
from penstock.worker.worker import Worker


def describe_arithmetic(worker: WorkerBase) -> str:
    """Describe kernels and arithmetic. On a CPU, equal texts and equal shares of a model mean equal bits.

    Empty for a worker of another class.
    """
    if not isinstance(worker, Worker):
        return ""
    device = worker.own_device
    kernels = describe_kernels() if device.kind == "cpu" else device.describe()
    return f"{kernels}, {worker.weights.describe_arithmetic()}"
