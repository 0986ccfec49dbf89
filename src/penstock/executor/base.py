"""Executor: the interface between the engine and its workers, wherever they run."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from penstock.config import EngineConfig
from penstock.contract import (
    DraftTokenIds,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    RpcCall,
    SamplingInput,
    SchedulerOutput,
)
from penstock.errors import ConfigError
from penstock.worker.memory_plan import MemoryPlan

# Default timeout of a step's result.
STEP_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Duration of a startup phase on the slowest rank, `rank`."""

    phase: str
    seconds: float
    rank: int


def describe_phases(times: list[PhaseTime], num_ranks: int) -> str:
    """Describe the phases in a line, such as "processes 2.1 s (rank 1), model 0.4 s (rank 0)"."""
    return ", ".join(
        f"{time.phase} {time.seconds:.1f} s" + (f" (rank {time.rank})" if num_ranks > 1 else "") for time in times
    )


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

    Failure is per process. A worker that raised is replaced: the engine shuts this executor down and makes a new one.
    That does not help where a device's context is lost (an illegal address, a kernel that never returns): every later
    call to that device, `synchronize` first of all, fails or hangs in the process that held it. Only a new process
    helps. So an executor with its worker in its own process refuses a restart (`why_not_restart`); one with workers in
    other processes ends those and starts new ones.
    """

    # Whether workers are known to need replacement before the next step.
    has_lost_workers: bool = False
    # The rank that answered the last call last.
    slowest_rank: int = 0
    # Startup phase in progress; None outside the start.
    current_phase: str | None = None

    @abstractmethod
    def __init__(self, config: EngineConfig) -> None: ...

    @cached_property
    def startup_times(self) -> list[PhaseTime]:
        """Durations of the startup phases, in order."""
        return []

    @contextmanager
    def startup_phase(self, name: str) -> Iterator[None]:
        """Time the calls made within as one startup phase."""
        self.current_phase, begin = name, time.monotonic()
        try:
            yield
        finally:
            self.current_phase = None
        self.startup_times.append(PhaseTime(name, time.monotonic() - begin, self.slowest_rank))

    def on_loss(self, callback: Callable[[], None]) -> None:  # noqa: B027 - a worker in this process cannot die by itself
        """Register a non-blocking callback for `has_lost_workers` becoming true between calls, run in any thread."""

    @abstractmethod
    def collective_rpc(self, call: RpcCall) -> list[Any]:
        """Call every worker; return one answer each, or that of `unique_reply_rank` only."""

    @property
    @abstractmethod
    def overlaps_with_host(self) -> bool:
        """Whether a launched step runs beside the host, so that asynchronous scheduling gains time."""

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum draft tokens per request and step; 0 without a speculator."""
        return 0

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return self.collective_rpc(RpcCall("get_kv_cache_spec"))

    def determine_available_memory(self) -> list[MemoryPlan]:
        with self.startup_phase("memory"):
            return self.collective_rpc(RpcCall("determine_available_memory"))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Allocate the KV cache on every worker, then warm up."""
        with self.startup_phase("KV cache"):
            self.collective_rpc(RpcCall("initialize_from_config", (kv_cache_config, max_model_len)))
        with self.startup_phase("warm-up"):
            self.collective_rpc(RpcCall("compile_or_warm_up_model"))

    def measure_step_costs(self) -> list[tuple[int, float]]:
        """Measured step times, agreed by all workers: (tokens, seconds), by rising number of tokens."""
        with self.startup_phase("step costs"):
            costs: list[tuple[int, float]] = self.collective_rpc(RpcCall("measure_step_costs"))[0]
        return costs

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> None:
        """Launch a step; `sample_tokens` of the same step must follow.

        Without `awaiting_req_ids` workers may sample as soon as the forward pass is done.
        """

    @abstractmethod
    def sample_tokens(self, sampling: SamplingInput) -> StepHandle:
        """Launch the sampling of an executed step, unless it is under way; return a handle for its result."""

    def take_draft_token_ids(self, timeout_s: float = STEP_TIMEOUT_S) -> DraftTokenIds | None:
        """Return the draft tokens for the next step to be sampled, once the result of the one before it was read.

        None without draft tokens.
        """
        (drafts,) = self.collective_rpc(RpcCall("take_draft_token_ids", timeout_s=timeout_s, unique_reply_rank=0))
        return drafts  # type: ignore[no-any-return]

    @abstractmethod
    def check_health(self) -> None:
        """Raise the known failure of a worker, if there is one.

        May be called between any two steps. It inspects processes and reported failures only; it neither waits for a
        device nor launches or allocates anything there, so that a hanging device does not hang the caller.
        """

    @abstractmethod
    def why_not_restart(self) -> str | None:
        """Reason why a new executor in this process could not serve after a failure; None if it could."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop all workers and free their resources; idempotent.

        Touches no device whose context is lost: the end of its process frees its memory.
        """


def check_reply_rank(unique_reply_rank: int | None, num_ranks: int) -> None:
    """Raise ConfigError for a rank that does not exist."""
    if unique_reply_rank is None or (type(unique_reply_rank) is int and 0 <= unique_reply_rank < num_ranks):
        return
    allowed = "0" if num_ranks == 1 else f"0 to {num_ranks - 1}"
    raise ConfigError(f"unique_reply_rank={unique_reply_rank!r} is not valid. Allowed: {allowed}, or None for all.")
