"""From the `distributed_executor_backend` option to an executor."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.executor.base import Executor
from penstock.executor.multiprocess import MultiprocessExecutor
from penstock.executor.program import refuse_in_program
from penstock.executor.uni import UniProcExecutor

_EXECUTORS: dict[str, type[Executor]] = {"uni": UniProcExecutor, "mp": MultiprocessExecutor}


def create_executor(config: EngineConfig) -> Executor:
    """The executor that the options ask for, its workers started and their models loaded."""
    refuse_in_program()
    return _EXECUTORS[config.parallel.executor](config)
