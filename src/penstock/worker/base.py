"""The interface that one rank's worker implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import EngineConfig
from penstock.contract import DraftTokenIds, GrammarOutput, KVCacheConfig, KVCacheSpec, SchedulerOutput
from penstock.models.interface import LanguageModel
from penstock.parallel import ParallelState
from penstock.runner.async_output import StepOutput
from penstock.worker.capabilities import require
from penstock.worker.changes_model import changes_model
from penstock.worker.memory_plan import MemoryPlan

_Result = TypeVar("_Result")


class WorkerBase(ABC):
    """One rank. The calls come in this order:

    init_device, load_model, get_kv_cache_spec, determine_available_memory, initialize_from_config,
    compile_or_warm_up_model, then execute_model and sample_tokens for each step, and shutdown at the end.
    A call out of order raises LifecycleError, which names the missing one.
    """

    # Drafts that its speculator makes for each request after each step, at most; 0 without one.
    num_speculative_tokens: int = 0

    def __init__(self, config: EngineConfig, parallel: ParallelState) -> None:
        self.config = config
        self.parallel = parallel

    @property
    def rank(self) -> int:
        return self.parallel.rank

    @abstractmethod
    def init_device(self) -> None:
        """Take the device, check the dtype."""

    @abstractmethod
    def load_model(self) -> None:
        """Build the model and load its weights."""

    @abstractmethod
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each attention layer stores, by layer name."""

    @abstractmethod
    def determine_available_memory(self) -> MemoryPlan:
        """Profile a step and plan the memory; `kv_cache_bytes` of the plan is what the KV cache may take."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Allocate the KV cache and everything that is sized by it."""

    @abstractmethod
    def compile_or_warm_up_model(self) -> None:
        """Make the first request as fast as the second."""

    def measure_step_costs(self) -> list[tuple[int, float]]:
        """How long steps of decoding requests take: some numbers of tokens, rising, the same on all ranks, and seconds.

        Where nothing is known, all steps count as equally long.
        """
        return []

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> None:
        """Run a step's forward pass; the caller must call `sample_tokens` for the same step."""

    @abstractmethod
    def sample_tokens(self, grammar: GrammarOutput) -> StepOutput:
        """Choose the tokens of an executed step."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What its speculator has drafted for the next step, copied to the host; None where it has none."""
        return None

    @abstractmethod
    def execute_dummy_batch(self) -> None:
        """Run a step that serves no request and touches nothing."""

    def forget_programs(self) -> None:  # noqa: B027 - a worker that records nothing has nothing to forget
        """Called when the model may have changed: what was recorded of it no longer holds."""

    @abstractmethod
    @changes_model
    def get_model(self) -> LanguageModel: ...

    @abstractmethod
    def check_health(self) -> None:
        """Return if the worker can serve, as far as is known; raise what is wrong if it cannot. Waits for no device."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give back all memory, and leave the process as it was; harmless when called twice.

        Not called once the device's context is lost, when only the end of the process gives anything back.
        """

    def get_config(self) -> EngineConfig:
        """The configuration with which the weights that serve were loaded."""
        return self.config

    @changes_model
    def apply_model(self, function: Callable[[LanguageModel], _Result]) -> _Result:
        """Call a function with the model and return what it returns."""
        return function(self.get_model())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A method of the design that is not built yet is refused by name, from the capability table."""
            require(name)
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
