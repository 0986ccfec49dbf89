"""Executor of the `distributed_executor_backend` option."""

from __future__ import annotations

import importlib
from typing import cast

from penstock.config import EngineConfig
from penstock.executor.base import Executor
from penstock.observability.standard_streams import occupy_standard_descriptors
from penstock.worker.capabilities import check_options

# Imported on demand: processes that start a core import this module without torch.
_EXECUTORS = {
    "uni": ("uni", "UniProcExecutor"),
    "mp": ("multiprocess", "MultiprocessExecutor"),
    "ray": ("ray", "RayExecutor"),
    "external_launcher": ("external_launcher", "ExternalLauncherExecutor"),
}


def environment_of_core(config: EngineConfig) -> dict[str, str]:
    """Return environment variables of a core in a process of its own: the address of the Ray cluster, if it uses one.

    This process connects first, so that all cores use the same cluster, which outlives each of them.
    """
    if config.parallel.executor != "ray":
        return {}
    connect = importlib.import_module("penstock.executor.ray_cluster").connect
    return {"RAY_ADDRESS": connect().get_runtime_context().gcs_address}


def create_executor(config: EngineConfig) -> Executor:
    """Create the executor of the options, with its workers started and their models loaded."""
    occupy_standard_descriptors()
    check_options(config)
    if config.parallel.tensor_parallel_size > 1:
        importlib.import_module("penstock.loader.loader").check_parallel_sizes(config)
    module, name = _EXECUTORS[config.parallel.executor]
    executor_type: type[Executor] = getattr(importlib.import_module(f"penstock.executor.{module}"), name)
    executor = executor_type(config)
    if config.recording.record is None:
        return executor
    recorder = importlib.import_module("penstock.executor.recording.recorder")
    return cast(Executor, recorder.RecordingExecutor(executor, config))
