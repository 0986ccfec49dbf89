"""What the engine asks of its workers, wherever they run."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

from penstock.config import EngineConfig
from penstock.contract import (
    DraftTokenIds,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
)
from penstock.errors import ConfigError
from penstock.executor.startup_phases import PhaseTime
from penstock.worker.memory_plan import MemoryPlan

# How long a step's result is waited for.
STEP_TIMEOUT_S = 300.0


class StepHandle(Protocol):
    """A step that has been launched."""

    @property
    def step_id(self) -> int: ...

    def get_output(self, timeout_s: float = STEP_TIMEOUT_S) -> ModelRunnerOutput:
        """Wait for the step's result.

        Raises WaitTimeout at the limit, WorkerError when the worker failed.
        """


class Executor(ABC):
    """Constructing one starts the workers, up to and including their models.

    Failure is per process. A worker that raised is replaced: this executor is shut down and a new one made. What that
    cannot mend is a device whose context is lost (an illegal address, a kernel that never returns): every later call to
    that device fails or hangs in the process that held it, a `synchronize` first of all, and nothing in it can be
    relied on or given back. It takes a new process. So an executor that keeps workers in its own process says no
    (`why_not_restart`); one that has them in others ends those and starts new ones.
    """

    # Whether workers must be replaced before the next step, as far as is known.
    has_lost_workers: bool = False
    # The rank that the last call waited for longest.
    slowest_rank: int = 0
    # Of the start, while it goes on.
    current_phase: str | None = None

    @abstractmethod
    def __init__(self, config: EngineConfig) -> None: ...

    @cached_property
    def startup_times(self) -> list[PhaseTime]:
        """Times of the startup phases, in their order."""
        return []

    @contextmanager
    def startup_phase(self, name: str) -> Iterator[None]:
        """Measure the calls made within as a phase of the start."""
        self.current_phase, begin = name, time.monotonic()
        try:
            yield
        finally:
            self.current_phase = None
        self.startup_times.append(PhaseTime(name, time.monotonic() - begin, self.slowest_rank))

    def on_loss(self, tell: Callable[[], None]) -> None:  # noqa: B027 - a worker in this process cannot die by itself
        """Let this be called, in any thread, when `has_lost_workers` becomes true by itself. It must not wait."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        """Call a method, or a function with the worker as its first argument, on every worker; one answer each.

        timeout_s: how long to wait for workers in other processes.
        unique_reply_rank: the only one whose answer is wanted; all run the call, so that they stay alike.
        """

    @property
    @abstractmethod
    def overlaps_with_host(self) -> bool:
        """Whether a launched step runs on while the host goes on, so that scheduling ahead gains time."""

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts that workers make for each request after each step, at most; 0 without a speculator."""
        return 0

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return self.collective_rpc("get_kv_cache_spec")

    def determine_available_memory(self) -> list[MemoryPlan]:
        with self.startup_phase("memory"):
            return self.collective_rpc("determine_available_memory")

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Allocate the KV cache on every worker, then warm up."""
        with self.startup_phase("KV cache"):
            self.collective_rpc("initialize_from_config", args=(kv_cache_config, max_model_len))
        with self.startup_phase("warm-up"):
            self.collective_rpc("compile_or_warm_up_model")

    def measure_step_costs(self) -> list[tuple[int, float]]:
        """How long steps take, as all workers agree: some numbers of tokens, rising, with seconds."""
        with self.startup_phase("step costs"):
            costs: list[tuple[int, float]] = self.collective_rpc("measure_step_costs")[0]
        return costs

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> None:
        """Launch a step; `sample_tokens` of the same step must follow."""

    def execute_unconstrained(self, output: SchedulerOutput) -> None:
        """`execute_model` of a step of which it is known that no grammar limits its tokens.

        They may be chosen as soon as it has run; `sample_tokens` must follow nevertheless.
        """
        self.execute_model(output)

    @abstractmethod
    def sample_tokens(self, grammar: GrammarOutput) -> StepHandle:
        """Launch the sampling of a step that was executed, unless it is under way, and say where its result will be."""

    def take_draft_token_ids(self, timeout_s: float = STEP_TIMEOUT_S) -> DraftTokenIds | None:
        """The drafts for the next step to be sampled, once the one before it was read.

        None where the workers' speculators have none.
        """
        (drafts,) = self.collective_rpc("take_draft_token_ids", timeout_s, unique_reply_rank=0)
        return drafts  # type: ignore[no-any-return]

    @abstractmethod
    def check_health(self) -> None:
        """Return if every worker can serve, as far as is known; raise what is wrong if one cannot.

        May be asked between any two steps: it looks at processes and at what calls have reported. It waits for no
        device, launches nothing there and allocates nothing, so that a device that hangs does not hang whoever asks.
        """

    @abstractmethod
    def why_not_restart(self) -> str | None:
        """After a failure: why an executor that is made now, by this process, could not serve either; else None."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop all workers and give back what they hold; harmless when called twice.

        Touches no device whose context is lost: what is held there is given back by the end of its process.
        """


def check_reply_rank(unique_reply_rank: int | None, num_ranks: int) -> None:
    """Raise ConfigError where there is no such rank."""
    if unique_reply_rank is None or (type(unique_reply_rank) is int and 0 <= unique_reply_rank < num_ranks):
        return
    allowed = "0" if num_ranks == 1 else f"0 to {num_ranks - 1}"
    raise ConfigError(f"unique_reply_rank={unique_reply_rank!r} is not valid. Allowed: {allowed}, or None for all.")
