"""Options of the worker's profiler."""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.config.checks import check_choice, check_flag, check_integer
from penstock.errors import ConfigError

PROFILERS = ("torch", "steps", "cuda")
_CYCLE = "profiler_delay_iterations", "profiler_wait_iterations", "profiler_repeat"


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    """profiler: "torch" writes a trace of every operator and rank to profiler_dir; "steps" writes one trace with the
        phases of the engine's steps and of all ranks, at almost no cost; "cuda" starts and stops the CUDA profiler that
        this process runs under, such as Nsight Systems (`nsys profile --capture-range=cudaProfilerApi`), with an NVTX
        range per step.
    profiler_dir: folder for traces; None forbids profiling with "torch" and "steps".
    profiler_use_gzip: compress the traces (to about a tenth).
    profiler_active_iterations: steps that a profile with "torch" or "cuda" records in a row; 0 records all steps from
        start to stop.
    profiler_delay_iterations: steps left out after the start, before the first cycle of wait, warm-up and active ones.
    profiler_wait_iterations: steps left out at the begin of each cycle.
    profiler_warmup_iterations: steps between the wait and the active ones, which "torch" traces and discards: the first
        traced steps are slower. "cuda" leaves them out.
    profiler_repeat: number of cycles, with a trace each; 0 goes on until the stop.
    profiler_record_shapes, profiler_with_memory, profiler_with_stack: record tensor shapes, allocations, and Python
        source lines too. Each makes the profiled steps slower.
    """

    profiler: str = "torch"
    profiler_dir: str | os.PathLike[str] | None = None
    profiler_use_gzip: bool = True
    profiler_record_shapes: bool = False
    profiler_with_memory: bool = False
    profiler_with_stack: bool = False
    profiler_active_iterations: int = 0
    profiler_delay_iterations: int = 0
    profiler_wait_iterations: int = 0
    profiler_warmup_iterations: int = 1
    profiler_repeat: int = 0

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
        self._check_schedule()

    def _check_schedule(self) -> None:
        for name in ("profiler_active_iterations", "profiler_warmup_iterations", *_CYCLE):
            check_integer(name, getattr(self, name), minimum=0)
        if self.profiler_active_iterations and self.profiler == "steps":
            raise ConfigError(
                f"profiler_active_iterations={self.profiler_active_iterations} is not valid with profiler='steps', "
                "which records all steps from start to stop. Use profiler='torch' or 'cuda', or leave it out."
            )
        given = [name for name in _CYCLE if getattr(self, name)]
        if given and not self.profiler_active_iterations:
            raise ConfigError(
                f"{given[0]}={getattr(self, given[0])} needs profiler_active_iterations, the number of steps to record."
            )
