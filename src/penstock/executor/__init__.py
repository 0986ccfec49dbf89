"""How workers are run."""

from penstock.executor.base import Executor, StepHandle
from penstock.executor.select import create_executor
from penstock.executor.uni import UniProcExecutor

__all__ = ["Executor", "StepHandle", "UniProcExecutor", "create_executor"]
