"""Recorder of steps: executors that write what they pass between scheduler and workers to a file."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.config import EngineConfig
from penstock.contract import KVCacheConfig, ModelRunnerOutput, Parts, RpcCall, SamplingInput, SchedulerOutput
from penstock.contract.feature import recorded_calls
from penstock.contract.recorded_call import RecordedCall
from penstock.errors import ConfigError, LifecycleError
from penstock.executor.base import STEP_TIMEOUT_S, Executor, StepHandle
from penstock.executor.recording.entries import (
    Called,
    Entry,
    Executed,
    Failed,
    Read,
    RecordingFile,
    Sampled,
    Start,
    is_being_written,
    now_s,
)
from penstock.executor.recording.held_requests import HeldRequests
from penstock.executor.recording.redaction import (
    redacted_request,
    redacted_result,
    redacted_step,
)
from penstock.worker.arithmetic import describe_arithmetic

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Window:
    """Recording that is about to begin.

    held: requests in the workers at its beginning; exact once the steps `unread` have been read. entries: since then.
    """

    held: HeldRequests
    unread: set[int]
    entries: list[Entry] = field(default_factory=list)


class Recorder:
    """Writes entries to a file, and begins it anew after each window.

    A new file begins with the requests that the workers hold. Until their state is exactly known, entries go to the old
    file too, so that a crash always leaves a whole recording. The recording ends with a warning where its file can no
    longer be written, as on a full disk; the engine goes on. Raises ConfigError where another engine records to the
    same file.
    """

    def __init__(
        self, config: EngineConfig, kv_cache_config: KVCacheConfig, max_model_len: int, arithmetic: str = ""
    ) -> None:
        options, rank = config.recording, config.parallel.data_parallel_rank
        self._path = options.file(None if config.parallel.data_parallel_size == 1 else rank)
        if is_being_written(self._path):
            raise ConfigError(
                f"record={str(self._path)!r} is not valid: another engine records to it. "
                "Give each engine a file of its own."
            )
        self._window_s = options.record_window_s
        self._is_redacted = not options.record_prompts
        self._start = Start(
            model=config.model.name_elsewhere,
            options=config.options(),
            kv_cache_config=kv_cache_config,
            max_model_len=max_model_len,
            vocab_size=config.model.vocab_size,
            is_redacted=self._is_redacted,
            arithmetic=arithmetic,
        )
        self._held = HeldRequests()
        self._steps: dict[int, SchedulerOutput] = {}
        self._recorded_calls = recorded_calls(config)
        # Last call of each place of a feature's state in the workers.
        self._calls: dict[tuple[str, Hashable], RecordedCall] = {}
        self._next: _Window | None = None
        self._file: RecordingFile | None = None
        with self._or_end():
            self._file = self._open()
        self._begun_at = self._launched_s = now_s()

    def executed(self, step: SchedulerOutput) -> None:
        """Record a step before its launch, which may end this process."""
        begin_s = now_s()
        if self._file is not None and self._next is None and begin_s - self._begun_at >= self._window_s:
            self._next = _Window(self._held.copy(), set(self._steps))
            self._begin_if_exact()
        self._held.launch(step)
        self._steps[step.step_id] = step
        shown = redacted_step(step) if self._is_redacted else step
        self._write(Executed(step=shown, begin_s=begin_s))

    def launched(self) -> None:
        """Note that the launch of the recorded step has returned."""
        self._launched_s = now_s()

    def sampled(self, sampling: SamplingInput, begin_s: float) -> None:
        """Record the sampling of the executed step."""
        shown = SamplingInput(step_id=sampling.step_id) if self._is_redacted else sampling
        self._write(Sampled(executed_s=self._launched_s, sampling=shown, begin_s=begin_s, end_s=now_s()))

    def read(self, result: ModelRunnerOutput, begin_s: float) -> None:
        """Record a step's result."""
        step = self._steps.pop(result.step_id)
        self._held.settle(step, result)
        shown = redacted_result(result) if self._is_redacted else result
        self._write(Read(result=shown, begin_s=begin_s, end_s=now_s()))
        if self._next is not None and result.step_id in self._next.unread:
            self._next.unread.discard(result.step_id)
            self._next.held.settle(step, result)
            self._begin_if_exact()

    def called(self, call: RpcCall) -> None:
        """Record a call that changed the workers' weights or the state of a feature; others leave no entry."""
        recorded_type = self._recorded_calls.get(call.method_name)
        if recorded_type is None:
            if call.effects.weights is not None:
                self._write(Called(method=call.name))
            return
        recorded = recorded_type.of(call)
        place = recorded.feature, recorded.place
        self._calls.pop(place, None)
        if not recorded.empties_place:
            self._calls[place] = recorded
        self._write(Called(method=call.name, call=self._shown(recorded) if recorded.is_whole else None))

    def _shown(self, call: RecordedCall) -> Parts:
        return Parts.of([call.redacted() if self._is_redacted else call])

    def failed(self, error: BaseException) -> None:
        """Record the failure of a call to the workers."""
        self._write(Failed(reason=f"{type(error).__name__}: {error}", at_s=now_s()))

    def close(self) -> None:
        """End the recording."""
        file, self._file, self._next = self._file, None, None
        # What cannot be written is lost.
        with suppress(OSError):
            if file is not None:
                file.close()

    def _write(self, entry: Entry) -> None:
        with self._or_end():
            if self._file is not None:
                self._file.write(entry)
        if self._next is not None:
            self._next.entries.append(entry)

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """End the recording where its file cannot be written."""
        try:
            yield
        except OSError as error:
            logger.warning("The recording %s ends, since it cannot be written: %s", self._path, error.strerror)
            self.close()

    def _begin_if_exact(self) -> None:
        """Begin the next file, if the state at its beginning is known."""
        window = self._next
        if window is None or window.unread:
            return
        self._next = None
        requests = window.held.as_new()
        self._start = msgspec.structs.replace(
            self._start,
            requests=[redacted_request(request) for request in requests] if self._is_redacted else requests,
            calls=[self._shown(call) for call in self._calls.values() if call.is_whole],
        )
        self.close()
        with self._or_end():
            self._file = self._open()
            for entry in window.entries:
                self._file.write(entry)
        self._begun_at = now_s()

    def _open(self) -> RecordingFile:
        """Create a file that begins with `_start`; keep the one before it as FILE.previous."""
        path = self._path
        unfinished = path.with_name(f"{path.name}.next")
        file = RecordingFile(unfinished)
        try:
            file.write(msgspec.structs.replace(self._start, created_at=time.time()))
            if path.exists():
                os.replace(path, path.with_name(f"{path.name}.previous"))
            os.replace(unfinished, path)
        except OSError:
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                unfinished.unlink()
            raise
        return file


class _RecordedHandle:
    """Step handle that records the result."""

    def __init__(self, handle: StepHandle, recorder: Recorder) -> None:
        self.step_id = handle.step_id
        self._handle = handle
        self._recorder = recorder

    def get_output(self, timeout_s: float = STEP_TIMEOUT_S) -> ModelRunnerOutput:
        begin_s = now_s()
        try:
            result = self._handle.get_output(timeout_s)
        except Exception as error:
            self._recorder.failed(error)
            raise
        self._recorder.read(result, begin_s)
        return result


class RecordingExecutor:
    """Executor that records what it passes to another one; its other attributes and methods are that one's."""

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        self._executor = executor
        self._config = config
        self._recorder: Recorder | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        self._executor.initialize_from_config(kv_cache_config, max_model_len)
        self._recorder = Recorder(self._config, kv_cache_config, max_model_len, arithmetic_of(self._executor))

    def execute_model(self, output: SchedulerOutput) -> None:
        with self._noting_failures() as recorder:
            recorder.executed(output)
            self._executor.execute_model(output)
            recorder.launched()

    def sample_tokens(self, sampling: SamplingInput) -> StepHandle:
        begin_s = now_s()
        with self._noting_failures() as recorder:
            handle = self._executor.sample_tokens(sampling)
            recorder.sampled(sampling, begin_s)
            return _RecordedHandle(handle, recorder)

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        answers = self._executor.collective_rpc(call)
        if self._recorder is not None:
            self._recorder.called(call)
        return answers

    def shutdown(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()
        self._executor.shutdown()

    @contextmanager
    def _noting_failures(self) -> Iterator[Recorder]:
        recorder = self._recorder
        if recorder is None:
            raise LifecycleError("Steps are recorded once the KV cache is allocated.")
        try:
            yield recorder
        except Exception as error:
            recorder.failed(error)
            raise


def arithmetic_of(executor: Executor) -> str:
    """Arithmetic of the executor's workers; that of each kind of worker where they differ."""
    return "; ".join(dict.fromkeys(executor.collective_rpc(RpcCall(describe_arithmetic))))
