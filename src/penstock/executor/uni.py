"""One worker, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.config import EngineConfig
from penstock.contract import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from penstock.executor.base import STEP_TIMEOUT_S, Executor, StepHandle
from penstock.worker import WorkerWrapperBase


class _ReportingHandle:
    """A step whose result is read here, but whose failure is the worker's."""

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
    """Calls run where they are made, so nothing is waited for and `timeout_s` of a call has no meaning."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._wrapper = WorkerWrapperBase(rpc_rank=0)
        try:
            self._wrapper.init_worker(config)
            self.collective_rpc("init_device")
            self.collective_rpc("load_model")
        except BaseException:
            self.shutdown()
            raise

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        return [self._wrapper.execute_method(method, *args, **(kwargs or {}))]

    @property
    def overlaps_with_host(self) -> bool:
        return bool(self._wrapper.worker.device.overlaps_with_host)

    def execute_model(self, output: SchedulerOutput) -> None:
        self._wrapper.execute_method("execute_model", output)

    def sample_tokens(self, grammar: GrammarOutput) -> StepHandle:
        return _ReportingHandle(self._wrapper, self._wrapper.execute_method("sample_tokens", grammar))

    def check_health(self) -> None:
        self.collective_rpc("check_health")

    def shutdown(self) -> None:
        self._wrapper.shutdown()
