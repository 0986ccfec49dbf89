"""The order of a run: every engine takes its turn in every repeat, and only one process is awake at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ceilings import Ceilings
from benchmarks.peers.catalogue import EngineSpec
from benchmarks.peers.checkpoints import make
from benchmarks.peers.environments import failure_of
from benchmarks.peers.process import EngineFailure, EngineProcess
from benchmarks.peers.results import Results
from benchmarks.peers.shapes import ModelShape
from benchmarks.workloads import Workload, make_workloads

STARTUP = "startup"
# Room for the keys and values of 32 requests of up to 512 tokens.
NUM_KV_TOKENS = 16_384
# Larger models are warmed up with a quarter of the requests.
_SMALL_MODEL = 200e6
_WARM_UP_TOKENS = 4
_WARM_UP_DRAW = 1_000_000
_DRAWS_APART = 1_000
# How often the machine is looked at before anything is measured, to know it at its best.
_FIRST_LOOKS = 20
# Of the memory that is free, what engines may take that wait for their turn.
_MEMORY_SHARE = 0.6
_PROCESS_BYTES = 700e6


class OutOfTime(Exception):
    """The budget is spent."""


@dataclass
class Runner:
    """budget_s: no measurement begins later than this after the start. steady: the share of the most arithmetic seen
    so far that the machine must allow right before and right after what counts; 0 to let everything count.
    """

    work_dir: Path
    results: Results
    threads: int
    repeats: int
    budget_s: float
    steady: float = 0.0

    def __post_init__(self) -> None:
        self._ceilings = Ceilings(self.work_dir / "bin", self.threads)
        if self.steady and not self._ceilings.is_available:
            raise ValueError("--steady needs the machine's ceilings, for which there is no C compiler here.")
        self._most_gflop_s = 0.0
        for _ in range(_FIRST_LOOKS if self.steady else 0):
            self._is_steady(self._ceilings.measure())
        self._begin = time.monotonic()
        self._processes: dict[str, EngineProcess] = {}
        self._failed: set[tuple[str, str, str]] = set()

    def run(self, shapes: list[ModelShape], workloads: list[str], engines: list[EngineSpec]) -> bool:
        """Measure what the results do not have yet. Returns whether all is done, rather than the time spent."""
        ready = [engine for engine in engines if self._is_installed(engine)]
        try:
            for shape in shapes:
                able = [engine for engine in ready if self._has_model(engine, shape)]
                for repeat in range(self.repeats):
                    self._repeat(shape, workloads, able, repeat)
                self._close_all()
        except OutOfTime:
            return False
        finally:
            self._close_all()
        return True

    def _is_installed(self, engine: EngineSpec) -> bool:
        failure = None if engine.environment is None else failure_of(self.work_dir, engine.environment)
        if failure is not None:
            self.results.add_unavailable(engine.name, None, f"not installed: {failure}")
        return failure is None

    def _has_model(self, engine: EngineSpec, shape: ModelShape) -> bool:
        try:
            make(self.work_dir, shape, engine.model_format)
        except (RuntimeError, OSError) as error:
            self.results.add_unavailable(engine.name, shape.name, str(error))
            return False
        return True

    def _repeat(self, shape: ModelShape, workloads: list[str], engines: list[EngineSpec], repeat: int) -> None:
        """Workload by workload where all engines fit into memory together, else engine by engine."""
        steady = [name for name in workloads if name != STARTUP]
        if self._all_fit(shape, engines):
            for workload in steady:
                for engine in engines:
                    self._steady(shape, workload, engine, repeat)
        else:
            for engine in engines:
                for workload in steady:
                    self._steady(shape, workload, engine, repeat)
                self._close(engine)
        if STARTUP in workloads:
            for engine in engines:
                if self._is_wanted(shape, STARTUP, engine, repeat):
                    self._record(shape, STARTUP, engine, repeat, self._measure_startup)

    def _steady(self, shape: ModelShape, workload: str, engine: EngineSpec, repeat: int) -> None:
        if self._is_wanted(shape, workload, engine, repeat):
            self._record(shape, workload, engine, repeat, self._measure_steady)

    def _is_wanted(self, shape: ModelShape, workload: str, engine: EngineSpec, repeat: int) -> bool:
        key = (shape.name, workload, engine.name)
        if self.results.has(*key, repeat) or key in self._failed:
            return False
        self._check_budget()
        return True

    def _check_budget(self) -> None:
        if time.monotonic() - self._begin > self.budget_s:
            raise OutOfTime

    def _record(self, shape: ModelShape, workload: str, engine: EngineSpec, repeat: int, measure: Any) -> None:
        try:
            fields = measure(shape, workload, engine, repeat)
        except EngineFailure as error:
            self._close(engine)
            # The other repeats would fail too; another run of the same command tries again.
            self._failed.add((shape.name, workload, engine.name))
            fields = {"error": str(error)}
        self.results.add(shape.name, workload, engine.name, repeat, **fields)
        figure = fields.get("error") or f"{fields['seconds']:8.3f} s"
        print(f"{shape.name:12} {workload:14} {repeat + 1}/{self.repeats} {engine.title:32} {figure}", file=sys.stderr)

    def _measure_steady(self, shape: ModelShape, name: str, engine: EngineSpec, repeat: int) -> dict[str, Any]:
        process = self._awake(engine, shape)
        for prompts, num_outputs in self._warm_up(process, shape, name, repeat):
            process.run(prompts, num_outputs)
        draw, is_steady = 1 + repeat, False
        while not is_steady:
            process.pause()
            ceilings = self._steady_ceilings()
            process.resume_at_rest()
            workload = find_workload(name, shape, draw=draw)
            reply = process.run(workload.prompts, workload.num_outputs)
            process.pause()
            is_steady = not self.steady or self._is_steady(self._ceilings.measure())
            if not is_steady:
                # Other tokens: those of this draw are in the cache of prefixes now.
                draw += _DRAWS_APART
        return {
            "draw": draw,
            "seconds": reply["seconds"],
            "tokens": reply["tokens"],
            "ceilings": ceilings,
            "versions": process.versions,
        }

    def _measure_startup(self, shape: ModelShape, _name: str, engine: EngineSpec, repeat: int) -> dict[str, Any]:
        """From the start of a process to its first token, for a prompt of 32."""
        workload = find_workload("decode", shape, draw=1 + repeat)
        is_steady = False
        while not is_steady:
            ceilings = self._steady_ceilings()
            process = self._start(engine, shape)
            try:
                reply = process.run(workload.prompts, [1])
            finally:
                process.close()
            is_steady = not self.steady or self._is_steady(self._ceilings.measure())
        return {
            "seconds": reply["since_start"],
            "tokens": reply["tokens"],
            "ceilings": ceilings,
            "versions": process.versions,
        }

    def _warm_up(
        self, process: EngineProcess, shape: ModelShape, name: str, repeat: int
    ) -> Iterator[tuple[list[list[int]], list[int]]]:
        """The workload with short outputs, once per process; after a pause only what wakes caches and threads."""
        workload = find_workload(name, shape, draw=_WARM_UP_DRAW + repeat)
        num_requests = len(workload.prompts)
        if name in process.warm:
            num_requests = 1
        elif shape.num_parameters > _SMALL_MODEL:
            num_requests = max(1, num_requests // 4)
        process.warm.add(name)
        yield (
            workload.prompts[:num_requests],
            [min(count, _WARM_UP_TOKENS) for count in workload.num_outputs[:num_requests]],
        )

    def _steady_ceilings(self) -> dict[str, float] | None:
        """Once the machine allows what it did at its best, if that is asked for."""
        measured = self._ceilings.measure()
        if not self._is_steady(measured):
            print(f"waiting for {self.steady:.0%} of {self._most_gflop_s:.0f} GFLOP/s", file=sys.stderr)
        while not self._is_steady(measured):
            self._check_budget()
            measured = self._ceilings.measure()
        return measured

    def _is_steady(self, measured: dict[str, float] | None) -> bool:
        gflop_s = 0.0 if measured is None else measured["gflop_s"]
        self._most_gflop_s = max(self._most_gflop_s, gflop_s)
        return gflop_s >= self.steady * self._most_gflop_s

    def _awake(self, engine: EngineSpec, shape: ModelShape) -> EngineProcess:
        process = self._processes.get(engine.name)
        if process is not None:
            process.resume()
            return process
        process = self._processes[engine.name] = self._start(engine, shape)
        return process

    def _start(self, engine: EngineSpec, shape: ModelShape) -> EngineProcess:
        return EngineProcess(
            engine,
            make(self.work_dir, shape, engine.model_format),
            self.work_dir,
            threads=self.threads,
            num_kv_tokens=NUM_KV_TOKENS,
            num_kv_bytes=NUM_KV_TOKENS * shape.kv_bytes_per_token,
        )

    def _all_fit(self, shape: ModelShape, engines: list[EngineSpec]) -> bool:
        """Weights twice (as loaded and as packed), and a cache of keys and values, for each."""
        if self._processes:
            return True
        weights = sum(2 * shape.num_parameters * engine.bits_per_weight / 8 for engine in engines)
        others = len(engines) * (_PROCESS_BYTES + NUM_KV_TOKENS * shape.kv_bytes_per_token)
        return weights + others < _MEMORY_SHARE * psutil.virtual_memory().available

    def _close(self, engine: EngineSpec) -> None:
        process = self._processes.pop(engine.name, None)
        if process is not None:
            process.close()

    def _close_all(self) -> None:
        for process in self._processes.values():
            with suppress(OSError):
                process.close()
        self._processes.clear()


def find_workload(name: str, shape: ModelShape, *, draw: int) -> Workload:
    """One of `make_workloads`; the lengths are always the same, `draw` chooses the tokens."""
    by_name = {workload.name: workload for workload in make_workloads(vocab_size=shape.vocab_size, draw=draw)}
    return by_name[name]
