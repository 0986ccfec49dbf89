"""Options of the worker's profiler."""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.config.checks import check_choice, check_flag
from penstock.errors import ConfigError

PROFILERS = ("torch", "steps", "cuda")


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    """profiler: "torch" writes a trace of every operator and rank to profiler_dir; "steps" writes one trace with the
        phases of the engine's steps and of all ranks, at almost no cost; "cuda" starts and stops the CUDA profiler that
        this process runs under, such as Nsight Systems (`nsys profile --capture-range=cudaProfilerApi`), with an NVTX
        range per step.
    profiler_dir: folder for traces; None forbids profiling with "torch" and "steps".
    profiler_use_gzip: compress the traces (to about a tenth).
    profiler_record_shapes, profiler_with_memory, profiler_with_stack: record tensor shapes, allocations, and Python
        source lines too. Each makes the profiled steps slower.
    """

    profiler: str = "torch"
    profiler_dir: str | os.PathLike[str] | None = None
    profiler_use_gzip: bool = True
    profiler_record_shapes: bool = False
    profiler_with_memory: bool = False
    profiler_with_stack: bool = False

    def __post_init__(self) -> None:
        check_choice("profiler", self.profiler, PROFILERS)
        if self.profiler == "cuda" and self.profiler_dir is not None:
            raise ConfigError(
                f"profiler_dir={str(self.profiler_dir)!r} is not valid with profiler='cuda', which writes no traces "
                "itself. Leave it out."
            )
        is_name = isinstance(self.profiler_dir, (str, os.PathLike)) and bool(os.fspath(self.profiler_dir))
        if self.profiler_dir is not None and not is_name:
            raise ConfigError(f"profiler_dir={self.profiler_dir!r} is not valid. Allowed: the name of a folder.")
        for name in ("profiler_use_gzip", "profiler_record_shapes", "profiler_with_memory", "profiler_with_stack"):
            check_flag(name, getattr(self, name))
