"""Workers that inject failures and draft tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.contract import SamplingInput, SchedulerOutput
from penstock.runner.model_runner import RunnerLimits
from penstock.worker.worker import Worker


class FailingWorker(Worker):
    """Worker that fails once when it executes or samples certain steps."""

    fails_at: set[tuple[str, int]]

    def execute_model(self, output: SchedulerOutput) -> None:
        self._fail("execute", output.step_id)
        super().execute_model(output)

    def sample_tokens(self, sampling: SamplingInput) -> Any:
        self._fail("sample", sampling.step_id)
        return super().sample_tokens(sampling)

    def _fail(self, *event: Any) -> None:
        if event in self.fails_at:
            self.fails_at.remove(event)
            raise RuntimeError("gone")


class DraftingWorker(Worker):
    """Worker with draft tokens."""

    def _limits(self, max_model_len: int) -> RunnerLimits:
        return replace(super()._limits(max_model_len), max_drafts=3)
