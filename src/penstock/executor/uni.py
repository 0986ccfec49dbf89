"""Executor with one worker in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.config import EngineConfig
from penstock.contract import ModelRunnerOutput, RpcCall, SamplingInput, SchedulerOutput
from penstock.executor.base import STEP_TIMEOUT_S, Executor, StepHandle, check_reply_rank
from penstock.parallel import ParallelState
from penstock.worker import WorkerWrapperBase

if TYPE_CHECKING:
    from penstock.worker import WorkerBase


class _ReportingHandle:
    """Step handle that reports failures as the worker's."""

    def __init__(self, wrapper: WorkerWrapperBase, handle: StepHandle) -> None:
        self.step_id = handle.step_id
        self._wrapper = wrapper
        self._handle = handle

    def get_output(self, timeout_s: float = STEP_TIMEOUT_S) -> ModelRunnerOutput:
        try:
            return self._handle.get_output(timeout_s)
        except Exception as error:
            self._wrapper.report("get_output", error)


class UniProcExecutor(Executor):
    """Calls run at once in the caller's thread, so `timeout_s` has no effect."""

    def __init__(self, config: EngineConfig, parallel: ParallelState | None = None) -> None:
        """parallel: rank and groups of the worker; None for a single worker."""
        self._wrapper = WorkerWrapperBase(rpc_rank=0 if parallel is None else parallel.rank)
        # Worker for the calls of every step; None before it is ready and after shutdown.
        self._worker: WorkerBase | None = None
        try:
            self._wrapper.init_worker(config, parallel)
            with self.startup_phase("device"):
                self.collective_rpc(RpcCall("init_device"))
            with self.startup_phase("model"):
                self.collective_rpc(RpcCall("load_model"))
            self._worker = self._wrapper.worker
        except BaseException:
            self.shutdown()
            raise

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        check_reply_rank(call.unique_reply_rank, 1)
        return [self._wrapper.execute_method(call.method, *call.args, **call.kwargs)]

    @property
    def overlaps_with_host(self) -> bool:
        return bool(self._wrapper.worker.own_device.overlaps_with_host)

    @property
    def num_speculative_tokens(self) -> int:
        return int(self._wrapper.worker.num_speculative_tokens)

    # Like `execute_method`, without its lookup in every step.
    def execute_model(self, output: SchedulerOutput) -> None:
        try:
            (self._worker or self._wrapper.worker).execute_model(output)
        except Exception as error:
            self._wrapper.report("execute_model", error)

    def sample_tokens(self, sampling: SamplingInput) -> StepHandle:
        try:
            handle: Any = (self._worker or self._wrapper.worker).sample_tokens(sampling)
        except Exception as error:
            self._wrapper.report("sample_tokens", error)
        return _ReportingHandle(self._wrapper, handle)

    def check_health(self) -> None:
        self._wrapper.check_device()
        self.collective_rpc(RpcCall("check_health"))

    def why_not_restart(self) -> str | None:
        if self._wrapper.device_lost_by is None:
            return None
        return (
            f"The device's context is lost ({self._wrapper.device_lost_by}), and this process cannot get another one. "
            "Start a new process."
        )

    def shutdown(self) -> None:
        self._worker = None
        self._wrapper.shutdown()
