"""CPU device that counts the memory of its tensors with torch's profiler of allocations."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.config import EngineConfig
from penstock.device.base import PeakMemory
from penstock.device.cpu import CpuDevice
from penstock.parallel import ParallelState
from penstock.runner.model_runner import RunnerLimits
from penstock.worker.feature import WorkerServices
from penstock.worker.memory_plan import MemoryTerm
from penstock.worker.profile import measure_step
from penstock.worker.unloaded_model import UnloadedModel, measure_unloaded
from penstock.worker.worker import Worker


class CountingDevice(CpuDevice):
    """CPU device that counts its large allocations. allocated: their bytes, such as tables of slots."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.allocated = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.allocated += num_bytes
        return super().allocate(num_bytes)

    @contextmanager
    def measure_peak(self) -> Iterator[PeakMemory]:
        peak, before = PeakMemory(), self.allocated
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            yield peak
        peak.bytes_above_start = _peak_bytes(recorded)
        peak.bytes_kept = self.allocated - before


def _peak_bytes(recorded: profile) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    return max(itertools.accumulate((change["args"]["Bytes"] for change in changes), initial=0))


def plan_and_run(folder: Path | str, **options: object) -> tuple[UnloadedModel, int, list[MemoryTerm]]:
    """Measure a model on the meta device, and the bytes of its weights and the terms of its steps in memory."""
    config = EngineConfig.create(str(folder), device="cpu", num_threads=1, **options)
    worker = Worker(config, ParallelState())
    worker.init_device()
    worker.load_model()
    limits, weights = RunnerLimits.of(config, config.model.planned_context), worker.weights
    services = WorkerServices(config, CountingDevice(), weights.language_model, worker.dtype.torch_dtype)
    step = measure_step(services, weights.layers, worker.get_kv_cache_spec(), limits, weights.speculator)
    unloaded = measure_unloaded(config, ParallelState(), "cpu", worker.dtype, limits)
    assert unloaded.specs == worker.get_kv_cache_spec()
    size_bytes: int = weights.size_bytes
    worker.shutdown()
    return unloaded, size_bytes, step
