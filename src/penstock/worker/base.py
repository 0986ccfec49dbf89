"""Worker interface of one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import EngineConfig
from penstock.contract import DraftTokenIds, KVCacheConfig, KVCacheSpec, SamplingInput, SchedulerOutput
from penstock.models.interface import LanguageModel
from penstock.parallel import ParallelState
from penstock.runner.async_output import StepOutput
from penstock.worker.capabilities import require
from penstock.worker.changes_model import changes_model
from penstock.worker.memory_plan import MemoryPlan

_Result = TypeVar("_Result")


class WorkerBase(ABC):
    """Worker of one rank. The calls come in this order:

    init_device, load_model, get_kv_cache_spec, determine_available_memory, initialize_from_config,
    compile_or_warm_up_model, then execute_model and sample_tokens for each step, and shutdown at the end.
    A call out of order raises LifecycleError, which names the missing one.
    """

    # Maximum draft tokens per request and step; 0 without a speculator.
    num_speculative_tokens: int = 0

    def __init__(self, config: EngineConfig, parallel: ParallelState) -> None:
        self.config = config
        self.parallel = parallel

    @property
    def rank(self) -> int:
        return self.parallel.rank

    @abstractmethod
    def init_device(self) -> None:
        """Initialise the device and choose the dtype."""

    @abstractmethod
    def load_model(self) -> None:
        """Build the model and load its weights."""

    @abstractmethod
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return the KV cache spec of each layer, by name."""

    def rpc_method(self, name: str) -> Callable[..., Any] | None:
        """Return the method that `collective_rpc` reaches by this name: the worker's own, or a feature's; or None."""
        method = getattr(self, name, None)
        return method if callable(method) else None

    def features_of_model(self) -> Sequence[str]:
        """Return the modules of the features that the model asks for."""
        return ()

    @abstractmethod
    def determine_available_memory(self) -> MemoryPlan:
        """Profile a step and plan the memory, with `kv_cache_bytes` for the KV cache."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Allocate the KV cache and create the runner."""

    @abstractmethod
    def compile_or_warm_up_model(self) -> None:
        """Warm up: run dummy steps, so that caches and kernels are initialised before the first request."""

    def measure_step_costs(self) -> list[tuple[int, float]]:
        """Measure decode steps: (tokens, seconds), by rising number of tokens, equal numbers on all ranks.

        Empty means equal times.
        """
        return []

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> None:
        """Run a step's forward pass; the caller must call `sample_tokens` for the same step."""

    @abstractmethod
    def sample_tokens(self, sampling: SamplingInput) -> StepOutput:
        """Sample an executed step."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the speculator's draft tokens for the next step, copied to the host; None without any."""
        return None

    @abstractmethod
    def execute_dummy_batch(self) -> None:
        """Run a dummy step, which changes no state."""

    def forget_programs(self) -> None:  # noqa: B027 - a worker that records nothing has nothing to forget
        """Drop recorded programs, since the model may have changed."""

    @abstractmethod
    @changes_model
    def get_model(self) -> LanguageModel: ...

    @abstractmethod
    def check_health(self) -> None:
        """Raise the known failure of the worker, if there is one. Does not wait for the device."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free all memory; idempotent.

        Not called after the device's context is lost, when only the end of the process frees memory.
        """

    def get_config(self) -> EngineConfig:
        """Return the configuration of the current weights."""
        return self.config

    @changes_model
    def apply_model(self, function: Callable[[LanguageModel], _Result]) -> _Result:
        """Call a function with the model and return its result."""
        return function(self.get_model())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise UnsupportedFeature for methods that are not implemented yet."""
            require(name)
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
