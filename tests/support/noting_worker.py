"""A worker without a model, for tests of how steps reach workers."""

from __future__ import annotations

from typing import Any

from penstock.contract import KVCacheConfig, KVCacheSpec, SampledOutput, SamplingInput, SchedulerOutput
from penstock.models.interface import LanguageModel
from penstock.runner.async_output import ReadyOutput
from penstock.worker import WorkerBase
from penstock.worker.memory_plan import MemoryPlan

# A step that fails where it is executed.
FAILS_AT = 13


class NotingWorker(WorkerBase):
    """Worker that records its calls, and samples as many tokens for a request as were scheduled."""

    def init_device(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._step: SchedulerOutput | None = None

    def load_model(self) -> None: ...

    def execute_model(self, output: SchedulerOutput) -> None:
        self.calls.append(("execute_model", output))
        if output.step_id == FAILS_AT:
            raise RuntimeError("no luck")
        self._step = output

    def sample_tokens(self, sampling: SamplingInput) -> ReadyOutput:
        self.calls.append(("sample_tokens", sampling))
        step, self._step = self._step, None
        assert step is not None, "a step is executed before it is sampled"
        tokens = [[step.step_id] * count for count in step.num_scheduled_tokens.values()]
        req_ids = list(step.num_scheduled_tokens)
        return ReadyOutput(SampledOutput(step_id=sampling.step_id, req_ids=req_ids, sampled_token_ids=tokens))

    def take_calls(self) -> list[tuple[str, Any]]:
        """Return the calls since the last `take_calls`."""
        calls, self.calls = self.calls, []
        return calls

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        raise NotImplementedError

    def determine_available_memory(self) -> MemoryPlan:
        raise NotImplementedError

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def execute_dummy_batch(self) -> None: ...

    def get_model(self) -> LanguageModel:
        raise NotImplementedError

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...
