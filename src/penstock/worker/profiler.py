"""Profiler of a worker's steps, with traces for a browser (chrome://tracing, https://ui.perfetto.dev)."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from penstock.config import ProfilerConfig
from penstock.contract import SamplingInput, SchedulerOutput
from penstock.errors import ConfigError, LifecycleError
from penstock.observability.spans import STEPS, ProcessSpans, SpanLog
from penstock.parallel import ParallelState

logger = logging.getLogger(__name__)
# Prefill length of a request by id; None if the worker does not hold it.
PrefillLength = Callable[[str], int | None]
RunStep = Callable[[SchedulerOutput], None]
_Sampled = TypeVar("_Sampled")
_RECORDED = ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE


def step_label(output: SchedulerOutput, prefill_length: PrefillLength) -> str:
    """Return the label of a step: requests and tokens in prefill (context) and decode (generation).

    A request is in prefill until all its prefill tokens are computed.
    """
    in_context = {request.req_id for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        length = prefill_length(req_id)
        if length is not None and num_computed < length:
            in_context.add(req_id)
    context_tokens = sum(output.num_scheduled_tokens[req_id] for req_id in in_context)
    generation = len(output.num_scheduled_tokens) - len(in_context)
    generation_tokens = output.total_num_scheduled_tokens - context_tokens
    return f"execute_context_{len(in_context)}({context_tokens})_generation_{generation}({generation_tokens})"


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Spans of a rank's steps. path: of the trace that the core is to write."""

    path: str
    process: ProcessSpans


class Profiler(ABC):
    """Base of profilers. spans: receiver of the runner's spans; None for none."""

    spans: SpanLog | None = None

    @abstractmethod
    def start(self, prefix: str | None) -> None: ...

    @abstractmethod
    def stop(self) -> Path | RankTrace | None: ...

    @abstractmethod
    def run_step(self, run: RunStep, output: SchedulerOutput, prefill_length: PrefillLength) -> None: ...

    def run_sampling(self, run: Callable[[SamplingInput], _Sampled], sampling: SamplingInput) -> _Sampled:
        return run(sampling)

    def shutdown(self) -> None:  # noqa: B027
        """Stop a running profile; idempotent."""


class StepProfiler(Profiler):
    """Spans of this rank's steps, between `start` and `stop`; the core writes those of all ranks to one trace.

    A step's span is from the begin of its execution to the end of its sampling, with the runner's spans inside.
    """

    def __init__(self, config: ProfilerConfig, parallel: ParallelState, engine: int | None = None) -> None:
        self.spans = self._log = SpanLog()
        of_engine = "" if engine is None else f"engine {engine} "
        self._name = f"{of_engine}rank {parallel.rank} (pp{parallel.pipeline.rank} tp{parallel.tensor.rank})"
        self._files = _TraceFiles(config, "steps" if engine is None else f"dp{engine}_steps")
        # Label, id and begin of the step that is executed and not sampled yet.
        self._step: tuple[str, int, float] | None = None

    def start(self, prefix: str | None) -> None:
        """Start recording. prefix, errors: as of `TorchProfiler.start`."""
        if self._log.is_recording:
            raise _is_running()
        self._files.begin(prefix)
        self._log.start()

    def stop(self) -> RankTrace:
        """Stop recording, and return the spans. Raises LifecycleError without a running profile."""
        if not self._log.is_recording:
            raise _not_running()
        self._step = None
        return RankTrace(str(self._files.path("trace.json")), ProcessSpans(self._name, self._log.take()))

    def run_step(self, run: RunStep, output: SchedulerOutput, prefill_length: PrefillLength) -> None:
        """Execute a step, whose span begins."""
        if self._log.is_recording and output.total_num_scheduled_tokens:
            self._step = step_label(output, prefill_length), output.step_id, time.perf_counter()
        self._log.begin()
        run(output)

    def run_sampling(self, run: Callable[[SamplingInput], _Sampled], sampling: SamplingInput) -> _Sampled:
        """Sample the executed step, whose span ends."""
        self._log.begin()
        sampled = run(sampling)
        if self._step is not None and self._step[1] == sampling.step_id:
            label, step_id, begin_s = self._step
            self._step = None
            self._log.end("sample", STEPS)
            self._log.add(label, begin_s, time.perf_counter(), STEPS, step=step_id)
        return sampled


class CudaProfiler(Profiler):
    """The CUDA profiler that the process runs under, between `start` and `stop`, with an NVTX range per step.

    With a schedule it records the active steps only. All engines of a process share it.
    """

    def __init__(self, config: ProfilerConfig) -> None:
        self._schedule = _schedule(config)
        self._is_running = False
        self._is_recording = False
        # Steps with tokens since the start.
        self._num_steps = 0

    def start(self, prefix: str | None) -> None:
        """Start recording.

        Raises LifecycleError if a profile runs already, ConfigError for a prefix, and without a GPU.
        """
        if self._is_running:
            raise _is_running()
        if prefix is not None:
            raise ConfigError(f"profile_prefix={prefix!r} is not valid with profiler='cuda', which writes no files.")
        if not torch.cuda.is_available():
            raise ConfigError("profiler='cuda' needs a GPU, and torch sees none. Use profiler='torch'.")
        self._is_running, self._num_steps = True, 0
        if self._schedule is None:
            self._record()

    def stop(self) -> Path | None:
        """Stop recording; the profiler itself writes the trace. Raises LifecycleError without a running profile."""
        if not self._is_running:
            raise _not_running()
        self._is_running = False
        self._pause()
        return None

    def run_step(self, run: RunStep, output: SchedulerOutput, prefill_length: PrefillLength) -> None:
        """Run a step in an NVTX range with its label."""
        if self._is_running and self._schedule is not None and output.total_num_scheduled_tokens:
            self._follow(self._schedule)
        if not self._is_recording:
            run(output)
            return
        torch.cuda.nvtx.range_push(step_label(output, prefill_length))
        try:
            run(output)
        finally:
            torch.cuda.nvtx.range_pop()

    def shutdown(self) -> None:
        """Stop a running profile; idempotent."""
        if self._is_running:
            self.stop()

    def _follow(self, action_of: Callable[[int], ProfilerAction]) -> None:
        """Record the step that comes, or not."""
        number, self._num_steps = self._num_steps, self._num_steps + 1
        if number and action_of(number - 1) is ProfilerAction.RECORD_AND_SAVE:
            self._pause()
        if action_of(number) in _RECORDED:
            self._record()

    def _record(self) -> None:
        if not self._is_recording:
            self._is_recording = True
            torch.cuda.profiler.start()
            logger.info("CUDA profiler started")

    def _pause(self) -> None:
        if self._is_recording:
            self._is_recording = False
            torch.cuda.profiler.stop()


class TorchProfiler(Profiler):
    """torch.profiler over all threads of this process, between `start` and `stop`.

    With a schedule it writes a trace of the active steps of each cycle. File names have prefix, engine (of several),
    rank and time.
    """

    def __init__(self, config: ProfilerConfig, parallel: ParallelState, engine: int | None = None) -> None:
        self._config = config
        of_engine = "" if engine is None else f"dp{engine}_"
        rank = f"{of_engine}pp{parallel.pipeline.rank}_tp{parallel.tensor.rank}_rank{parallel.rank}"
        self._files = _TraceFiles(config, rank)
        self._profile: profile | None = None
        self._has_begun = False
        self._written: Path | None = None

    def start(self, prefix: str | None) -> None:
        """Start recording. prefix: prefix of the trace's file name.

        Raises LifecycleError if a profile runs already, ConfigError if the folder is not writable.
        """
        if self._profile is not None:
            raise _is_running()
        self._files.begin(prefix)
        if torch.autograd.profiler._is_profiler_enabled:
            raise LifecycleError(
                "torch's profiler is in use in this process, by another engine or by other code, and records one "
                "profile at a time. Stop that one first."
            )
        started = self._new_profile()
        started.start()
        self._profile, self._has_begun, self._written = started, False, None
        logger.info("Profiling into %s", self._files.folder)

    def stop(self) -> Path | None:
        """Stop recording, write the trace and return its path; the last trace's path with a schedule.

        None if no step of the schedule was recorded. Raises LifecycleError without a running profile.
        """
        if self._profile is None:
            raise _not_running()
        stopped, self._profile = self._profile, None
        stopped.stop()
        if self._written is None:
            logger.warning("The profile ended before its schedule had recorded a step: no trace is written")
        return self._written

    def run_step(self, run: RunStep, output: SchedulerOutput, prefill_length: PrefillLength) -> None:
        """Run a step with its label in the trace."""
        if self._profile is None:
            run(output)
            return
        if output.total_num_scheduled_tokens:
            if self._has_begun:
                # Now, since the step before is sampled only now.
                self._profile.step()
            self._has_begun = True
        with record_function(step_label(output, prefill_length)):
            run(output)

    def shutdown(self) -> None:
        """Stop a running profile; idempotent."""
        if self._profile is None:
            return
        try:
            self.stop()
        except Exception:
            # Logged and not raised, so that the worker frees its other resources.
            logger.exception("The profile that was running could not be written")

    def _write(self, recorded: profile) -> None:
        self._written = path = self._files.path("pt.trace.json")
        recorded.export_chrome_trace(str(path))
        logger.info("Profile written to %s", path)

    def _new_profile(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        made = profile(
            activities=activities,
            schedule=_schedule(self._config),
            on_trace_ready=self._write,
            record_shapes=self._config.profiler_record_shapes,
            profile_memory=self._config.profiler_with_memory,
            with_stack=self._config.profiler_with_stack,
            # Steps may run in another thread than `start`.
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        # Its own ranges of steps would begin in one thread and end in another.
        made.record_steps = False
        return made


class _TraceFiles:
    """Names of a profiler's traces. name: of the profiler's engine and rank."""

    def __init__(self, config: ProfilerConfig, name: str) -> None:
        assert config.profiler_dir is not None
        self.folder = Path(config.profiler_dir).expanduser()
        self._name = name
        self._prefix = ""
        self._suffix = ".gz" if config.profiler_use_gzip else ""

    def begin(self, prefix: str | None) -> None:
        """Check and note the prefix of the next trace, and make the folder.

        Raises ConfigError for a prefix with slashes, and if the folder is not writable.
        """
        if prefix is not None and (not prefix or Path(prefix).name != prefix):
            raise ConfigError(f"profile_prefix={prefix!r} is not valid. Allowed: text without slashes.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".{self._name}.{os.getpid()}.probe"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"profiler_dir={str(self.folder)!r} cannot be written to: {error.strerror}. Give another folder."
            ) from error
        self._prefix = f"{prefix}_" if prefix else ""

    def path(self, kind: str) -> Path:
        """Path of a trace that ends now."""
        return self.folder / f"{self._prefix}{self._name}.{time.time_ns()}.{kind}{self._suffix}"


def create_profiler(config: ProfilerConfig, parallel: ParallelState, engine: int | None = None) -> Profiler | None:
    """Create the profiler of the options; None without one. engine: the engine's number, of several."""
    if config.profiler == "cuda":
        return CudaProfiler(config)
    if config.profiler_dir is None:
        return None
    made = StepProfiler if config.profiler == "steps" else TorchProfiler
    return made(config, parallel, engine)


def _schedule(config: ProfilerConfig) -> Callable[[int], ProfilerAction] | None:
    """Action of each step since the start; None where all steps are recorded."""
    if not config.profiler_active_iterations:
        return None
    action_of: Callable[[int], ProfilerAction] = schedule(
        skip_first=config.profiler_delay_iterations,
        wait=config.profiler_wait_iterations,
        warmup=config.profiler_warmup_iterations,
        active=config.profiler_active_iterations,
        repeat=config.profiler_repeat,
    )
    return action_of


def _is_running() -> LifecycleError:
    return LifecycleError("A profile is running already. Stop it (stop_profile) before the next one starts.")


def _not_running() -> LifecycleError:
    return LifecycleError("No profile is running: start_profile must come first (or the worker was restarted).")


def not_configured() -> ConfigError:
    return ConfigError(
        "Profiling is not configured: profiler_dir is not set. Start the engine with profiler_dir='FOLDER' "
        "(profiler_dir=FOLDER), then call start_profile and stop_profile around the calls to record."
    )
