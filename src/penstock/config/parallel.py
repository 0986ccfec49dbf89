"""Options of parallelism, executors and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.config.checks import check_choice, check_flag, check_integer, check_seconds
from penstock.errors import ConfigError

EXECUTORS = ("uni", "mp", "ray", "external_launcher")
RAY_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
DEFAULT_WORKER = "penstock.worker.worker.Worker"
# Timeout of workers that compute, as a multiple of the timeout of workers without progress.
BUSY_FACTOR = 4


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """tensor_parallel_size: workers that share every layer of a stage.
    pipeline_parallel_size: pipeline stages, of `tensor_parallel_size` workers each.
    pipeline_layers: layers of each stage, such as (10, 12, 10), or "10,12,10"; None divides them about equally.
    decode_context_parallel_size: workers with the same KV heads that shard the KV cache along the sequence (decode
        context parallel); divides tensor_parallel_size.
    cp_kv_cache_interleave_size: consecutive tokens of the KV cache per context-parallel rank; divides block_size.
    enable_sp: sequence parallelism: shard norms and residual additions along the tokens of long steps.
    sp_min_token_num: minimum tokens of a step for sequence parallelism.
    data_parallel_size: engine replicas with the whole model each, behind one load balancer.
    data_parallel_size_local: replicas on this machine, which share its cores and memory; None for all of them.
    data_parallel_rank: start only this replica, for an external load balancer; None starts all of them.
    data_parallel_rank_local: rank among the replicas on this machine; None for the rank modulo
        data_parallel_size_local.
    enable_multiprocessing: run the engine core in a process of its own, which is restarted when it dies; None does so
        with `AsyncEngine`, and with several replicas.
    distributed_executor_backend: "uni" runs one worker in this process, "mp" a process per worker, "ray" a Ray actor
        per worker; "external_launcher" makes this process, started by torchrun, one of the workers. None takes "mp"
        for several workers, else "uni".
    ray_placement: placement strategy of Ray for the stages, or for the workers of a stage that fits no node.
    worker_cls: qualified name of the worker class.
    worker_extension_cls: qualified name of a class whose methods become callable on the worker.
    max_restarts: restarts of a failed worker, or core, without progress before the engine gives up.
    step_timeout_s: seconds of a step without computation after which hanging workers are restarted. A step that
        computes may take four times as long. For workers and cores in processes of their own; a core with worker
        processes has a longer timeout.
    start_timeout_s: timeout of each phase of a worker process's start, such as loading the model; then the start
        fails. The timeout of a restarted core follows from it.

    Raises ConfigError for values that are not allowed, or have no effect together with the others.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_layers: tuple[int, ...] | None = None
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    enable_sp: bool = False
    sp_min_token_num: int = 256
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None
    data_parallel_rank: int | None = None
    data_parallel_rank_local: int | None = None
    enable_multiprocessing: bool | None = None
    distributed_executor_backend: str | None = None
    ray_placement: str = "PACK"
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
        self._check_engines()
        if self.pipeline_layers is not None:
            object.__setattr__(self, "pipeline_layers", _layers(self.pipeline_layers, self.pipeline_parallel_size))
        if self.distributed_executor_backend is not None:
            check_choice("distributed_executor_backend", self.distributed_executor_backend, EXECUTORS)
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ConfigError(
                f"distributed_executor_backend='uni' runs one worker, and {self.world_size} are asked for. "
                "Leave it out, or use 'mp'."
            )
        check_choice("ray_placement", self.ray_placement, RAY_PLACEMENTS)
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
        self._check_effects()

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def rank_with_results(self) -> int:
        """First rank of the last stage, which samples."""
        return self.world_size - self.tensor_parallel_size

    @property
    def longest_step_s(self) -> float:
        """Timeout of a step in which workers compute, in seconds."""
        return BUSY_FACTOR * self.step_timeout_s

    @property
    def longest_start_phase_s(self) -> float:
        """Timeout of a phase of start-up in which workers compute, in seconds."""
        return BUSY_FACTOR * self.start_timeout_s

    @property
    def must_agree_on_time(self) -> bool:
        """Whether decisions may not depend on time, since every rank has an engine of its own."""
        return self.executor == "external_launcher"

    @property
    def executor(self) -> str:
        """Effective `distributed_executor_backend`."""
        return self.distributed_executor_backend or ("uni" if self.world_size == 1 else "mp")

    @property
    def num_engines_here(self) -> int:
        """Engine replicas that are started with these options."""
        return self.data_parallel_size if self.data_parallel_rank is None else 1

    @property
    def engine_number(self) -> int | None:
        """Data parallel rank of this engine; None for a single engine."""
        return None if self.data_parallel_size == 1 else self.data_parallel_rank

    @property
    def has_core_process(self) -> bool:
        """Whether engine cores run in processes of their own. `AsyncEngine` sets `enable_multiprocessing` first."""
        return self.num_engines_here > 1 if self.enable_multiprocessing is None else self.enable_multiprocessing

    def of_engine(self, index: int) -> ParallelConfig:
        """Configuration of one engine replica, in a process of its own."""
        rank = index if self.data_parallel_rank is None else self.data_parallel_rank
        return replace(self, data_parallel_rank=rank, enable_multiprocessing=False)

    def place(self, rank: int) -> tuple[int, int]:
        """Return a worker's number among all workers of all engines on this machine, and their count."""
        num_engines = self.data_parallel_size_local or self.data_parallel_size
        engine = self.data_parallel_rank_local
        if engine is None:
            engine = (self.data_parallel_rank or 0) % num_engines
        return engine * self.world_size + rank, num_engines * self.world_size

    def _check_effects(self) -> None:
        """Refuse options that would have no effect."""
        executor = f"distributed_executor_backend={self.executor!r}"
        by_launcher = f"{executor}, where the launcher places the processes"
        for name, has_effect, where in (
            ("pipeline_layers", self.pipeline_parallel_size > 1, "pipeline_parallel_size=1: one stage has all layers"),
            ("cp_kv_cache_interleave_size", self.decode_context_parallel_size > 1, "decode_context_parallel_size=1"),
            ("enable_sp", self.tensor_parallel_size > 1, "tensor_parallel_size=1"),
            ("sp_min_token_num", self.enable_sp, "enable_sp=False"),
            ("data_parallel_size_local", not self.must_agree_on_time, by_launcher),
            ("data_parallel_rank_local", not self.must_agree_on_time, by_launcher),
            ("ray_placement", self.executor == "ray", executor),
            ("start_timeout_s", not self.must_agree_on_time, f"{executor}, whose start has no watchdog"),
        ):
            value = getattr(self, name)
            if not has_effect and value != _DEFAULTS[name]:
                raise ConfigError(f"{name}={value!r} has no effect with {where}. Leave it out, or change the other.")

    def _check_engines(self) -> None:
        size, local, rank = self.data_parallel_size, self.data_parallel_size_local, self.data_parallel_rank
        check_integer("data_parallel_size", size, 1)
        if local is not None:
            _check_at_most("data_parallel_size_local", local, 1, size, f"data_parallel_size={size}")
        if rank is not None:
            _check_at_most("data_parallel_rank", rank, 0, size - 1, f"data_parallel_size={size}")
        elif local not in (None, size):
            raise ConfigError(
                f"data_parallel_size_local={local} is not valid with data_parallel_size={size} and no "
                f"data_parallel_rank: all engines are started on this machine. Leave it out, or start each engine "
                "separately, with its data_parallel_rank."
            )
        if self.data_parallel_rank_local is not None:
            if rank is None:
                raise ConfigError(
                    f"data_parallel_rank_local={self.data_parallel_rank_local} is not valid without data_parallel_rank."
                )
            here = size if local is None else local
            limit = f"{here} engines on this machine (data_parallel_size_local)"
            _check_at_most("data_parallel_rank_local", self.data_parallel_rank_local, 0, here - 1, limit)
        if self.enable_multiprocessing is not None:
            check_flag("enable_multiprocessing", self.enable_multiprocessing)
        if self.enable_multiprocessing is False and self.num_engines_here > 1:
            raise ConfigError(
                f"enable_multiprocessing=False is not valid with data_parallel_size={size}: several engines run in "
                "processes of their own. Leave it out, or start one engine, with its data_parallel_rank."
            )


_DEFAULTS = {field.name: field.default for field in fields(ParallelConfig)}


def _check_at_most(name: str, value: Any, least: int, most: int, limit: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        allowed = f"{least}" if least == most else f"{least} to {most}"
        raise ConfigError(f"{name}={value!r} is not valid with {limit}. Allowed: {allowed}.")


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
