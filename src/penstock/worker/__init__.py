"""A device's life from start to shutdown."""

from penstock.worker.base import WorkerBase
from penstock.worker.wrapper import WorkerWrapperBase

__all__ = ["WorkerBase", "WorkerWrapperBase"]
