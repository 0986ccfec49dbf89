"""From the `distributed_executor_backend` option to an executor."""

from __future__ import annotations

import importlib

from penstock.config import EngineConfig
from penstock.executor.base import Executor
from penstock.executor.program import refuse_in_program

# What only some engines need is imported for them alone.
_EXECUTORS = {
    "uni": ("uni", "UniProcExecutor"),
    "mp": ("multiprocess", "MultiprocessExecutor"),
    "ray": ("ray", "RayExecutor"),
    "external_launcher": ("external_launcher", "ExternalLauncherExecutor"),
}


def create_executor(config: EngineConfig) -> Executor:
    """The executor that the options ask for, its workers started and their models loaded."""
    refuse_in_program()
    module, name = _EXECUTORS[config.parallel.executor]
    executor: type[Executor] = getattr(importlib.import_module(f"penstock.executor.{module}"), name)
    return executor(config)
