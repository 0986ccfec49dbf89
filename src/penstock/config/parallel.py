"""How many workers there are, and which class they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.checks import check_choice, check_flag, check_integer, check_seconds
from penstock.errors import ConfigError

EXECUTORS = ("uni", "mp")
DEFAULT_WORKER = "penstock.worker.worker.Worker"
# How many times a limit for those who make no progress may be taken by those who compute.
BUSY_FACTOR = 4


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """tensor_parallel_size: workers that have a part of every layer each, on one CPU machine so far.
    pipeline_parallel_size: stages, which are workers (`tensor_parallel_size` each) that have layers of their own.
    pipeline_layers: how many layers each stage has, such as (10, 12, 10), or "10,12,10"; None for about equally many.
    decode_context_parallel_size: of the workers that have the same KV heads, how many keep their positions by turns
        instead of all of them; divides tensor_parallel_size.
    cp_kv_cache_interleave_size: positions in a row that each of them keeps; divides block_size.
    enable_sp: whether workers that share layers keep some tokens each of what is between the layers, in long steps.
    sp_min_token_num: tokens of a step from which on they do.
    distributed_executor_backend: "uni" runs the worker in this process, "mp" each in a process of its own; None takes
        "mp" for several workers.
    worker_cls: qualified name of the worker class.
    worker_extension_cls: qualified name of a class whose methods become callable on the worker.
    max_restarts: how often a failed worker is replaced without progress before the engine gives up.
    step_timeout_s: seconds of a step in which no worker computes; then all are replaced, since they hang. A step in
        which they compute may take four times as long. Of workers in processes of their own.
    start_timeout_s: the same for each stage of their start, such as loading the model; then the start fails.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_layers: tuple[int, ...] | None = None
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    enable_sp: bool = False
    sp_min_token_num: int = 256
    distributed_executor_backend: str | None = None
    worker_cls: str = DEFAULT_WORKER
    worker_extension_cls: str | None = None
    max_restarts: int = 3
    step_timeout_s: float = 300.0
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_integer("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_integer("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        check_integer("decode_context_parallel_size", self.decode_context_parallel_size, 1)
        check_integer("cp_kv_cache_interleave_size", self.cp_kv_cache_interleave_size, 1)
        check_flag("enable_sp", self.enable_sp)
        check_integer("sp_min_token_num", self.sp_min_token_num, 1)
        if self.tensor_parallel_size % self.decode_context_parallel_size != 0:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} is not valid with "
                f"tensor_parallel_size={self.tensor_parallel_size}. Allowed: its divisors."
            )
        if self.pipeline_layers is not None:
            object.__setattr__(self, "pipeline_layers", _layers(self.pipeline_layers, self.pipeline_parallel_size))
        if self.distributed_executor_backend is not None:
            check_choice("distributed_executor_backend", self.distributed_executor_backend, EXECUTORS)
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ConfigError(
                f"distributed_executor_backend='uni' runs one worker, and {self.world_size} are asked for. "
                "Leave it out, or use 'mp'."
            )
        check_integer("max_restarts", self.max_restarts, 0)
        check_seconds("step_timeout_s", self.step_timeout_s)
        check_seconds("start_timeout_s", self.start_timeout_s)
        for name in ("worker_cls", "worker_extension_cls"):
            value = getattr(self, name)
            if value is None and name == "worker_extension_cls":
                continue
            if not isinstance(value, str) or "." not in value:
                raise ConfigError(
                    f"{name}={value!r} is not valid. Allowed: a qualified class name such as '{DEFAULT_WORKER}'."
                )

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def rank_with_results(self) -> int:
        """The first of the last stage, which samples."""
        return self.world_size - self.tensor_parallel_size

    @property
    def longest_step_s(self) -> float:
        """What a step may take in which workers compute."""
        return BUSY_FACTOR * self.step_timeout_s

    @property
    def executor(self) -> str:
        """Of `EXECUTORS`, the one that is meant."""
        return self.distributed_executor_backend or ("uni" if self.world_size == 1 else "mp")


def _layers(given: Sequence[int] | str, num_stages: int) -> tuple[int, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    try:
        layers = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        layers = ()
    if len(layers) != num_stages or min(layers) < 1:
        raise ConfigError(
            f"pipeline_layers={given!r} is not valid. Allowed: a number of layers, at least 1, for each of the "
            f"pipeline_parallel_size={num_stages} stages, such as {','.join(['10'] * num_stages)!r}."
        )
    return layers
