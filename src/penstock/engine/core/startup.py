"""Engine start-up: creates the workers, plans the memory and allocates the KV cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config import EngineConfig
from penstock.contract import CrossAttentionSpec, KVCacheConfig, KVCachePool, KVCacheSpec, RecurrentStateSpec, RpcCall
from penstock.engine.planning.kv_cache_size import (
    bound_kv_cache,
    choose_max_model_len,
    size_kv_cache,
    specs_of_all,
    whole_kv_cache_bytes,
)
from penstock.errors import UnsupportedFeature
from penstock.executor import Executor, create_executor
from penstock.executor.base import PhaseTime, describe_phases
from penstock.observability.units import format_bytes
from penstock.scheduler.kv_cache_plan import max_concurrency, named_pools, num_snapshots
from penstock.worker.memory_plan import MemoryPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StartedEngine:
    """Workers with their KV cache, and the plan by which they were started.

    config: configuration with which the current weights were loaded. weight_calls: calls since then that change the
    next load. step_costs: measured (tokens, seconds) of steps; None without adaptive speculative decoding.
    features_of_model: modules of the features that the model asks for.
    """

    config: EngineConfig
    executor: Executor
    memory_plan: MemoryPlan
    kv_cache_config: KVCacheConfig
    max_model_len: int
    step_costs: list[tuple[int, float]] | None = None
    features_of_model: Sequence[str] = ()
    weight_calls: list[RpcCall] = field(default_factory=list)

    @property
    def startup_times(self) -> list[PhaseTime]:
        """Times of the startup phases of the current workers."""
        return self.executor.startup_times

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of KV cache per worker, of the largest stage with pipeline parallel."""
        parallel = self.config.parallel
        layers = parallel.pipeline_layers or [1] * parallel.pipeline_parallel_size

        def of_largest(pool: KVCachePool) -> int:
            num_tensors = len(pool.tensors)
            return pool.size_bytes * -(-num_tensors * max(layers) // sum(layers)) // num_tensors

        return sum(map(of_largest, self.kv_cache_config.pools))

    def restart_workers(self) -> None:
        """Replace the workers by fresh ones with the same KV cache layout, empty."""
        begin = time.monotonic()
        self.executor.shutdown()
        self.executor = create_executor(self.config)
        self.executor.initialize_from_config(self.kv_cache_config, self.max_model_len)
        for call in self.weight_calls:
            self.executor.collective_rpc(call)
        _log_times("Workers replaced", begin, self.executor, self.config)


def start_engine(config: EngineConfig) -> StartedEngine:
    """Start the workers, plan the memory and allocate the KV cache.

    Raises OutOfMemory with the arithmetic when it does not work out.
    """
    begin = time.monotonic()
    executor = create_executor(config)
    try:
        specs_by_rank = executor.get_kv_cache_specs()
        specs = specs_of_all(specs_by_rank)
        if executor.num_speculative_tokens:
            _check_can_speculate(specs)
        plans = executor.determine_available_memory()
        plan = min(plans, key=lambda plan: plan.kv_cache_bytes)
        available = whole_kv_cache_bytes(specs_by_rank, plans)
        max_model_len = choose_max_model_len(config, specs, plan, available)
        kv_cache_config = size_kv_cache(config, specs, plan, max_model_len, available)
        executor.initialize_from_config(kv_cache_config, max_model_len)
        is_adaptive = config.speculative.method is not None and config.speculative.adaptive
        step_costs = executor.measure_step_costs() if is_adaptive else None
        (of_model,) = executor.collective_rpc(RpcCall("features_of_model", unique_reply_rank=0))
    except BaseException:
        executor.shutdown()
        raise
    reason = bound_kv_cache(config, specs, plan, max_model_len, available).reason
    _log_kv_cache(config, kv_cache_config, max_model_len, reason)
    _log_times("Ready", begin, executor, config)
    return StartedEngine(config, executor, plan, kv_cache_config, max_model_len, step_costs, of_model)


def _log_kv_cache(config: EngineConfig, kv_cache_config: KVCacheConfig, max_model_len: int, reason: str) -> None:
    if not kv_cache_config.groups:
        logger.info("KV cache: none, since the model needs none; texts of up to %s tokens", f"{max_model_len:,}")
        return
    concurrency = max_concurrency(
        kv_cache_config,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    logger.info(
        "KV cache: up to %s (%s), %s; %.1f requests of %s tokens at once",
        format_bytes(kv_cache_config.size_bytes),
        reason,
        " and ".join(f"{pool.num_blocks:,} {name}" for pool, name in named_pools(kv_cache_config)),
        concurrency,
        f"{max_model_len:,}",
    )
    num_seqs = config.scheduler.max_num_seqs
    for number in num_snapshots(kv_cache_config, num_seqs).values():
        logger.info(
            "Snapshots: %s states for later requests, while %s run; more while fewer do",
            f"{number:,}",
            num_seqs,
        )
    has_states = any(isinstance(group.spec, RecurrentStateSpec) for group in kv_cache_config.groups)
    if config.cache.enable_prefix_caching and has_states and config.cache.snapshots == "none":
        logger.info("Prefix caching: off, by mamba_cache_mode='none'")
    has_sources = any(isinstance(group.spec, CrossAttentionSpec) for group in kv_cache_config.groups)
    if config.cache.enable_prefix_caching and has_sources:
        logger.info("Prefix caching: off, since the KV of all tokens depends on the encoder's output")


def _log_times(what: str, begin: float, executor: Executor, config: EngineConfig) -> None:
    whole, times = time.monotonic() - begin, executor.startup_times
    phases = describe_phases(times, config.parallel.world_size)
    # Imports, messages to workers, and planning; with several ranks the phases are those of the slowest rank each.
    other = max(0.0, whole - sum(one.seconds for one in times))
    logger.info("%s in %.1f s: %s, other %.1f s", what, whole, phases, other)


def _check_can_speculate(specs: Mapping[str, KVCacheSpec]) -> None:
    """Raise UnsupportedFeature for an engine that cannot verify draft tokens."""
    states = [name for name, spec in specs.items() if isinstance(spec, RecurrentStateSpec) and not spec.rolls_back]
    if states:
        raise UnsupportedFeature(
            f"speculative_config: {states[0]} keeps a state of each request, which drafts that are rejected would have "
            "changed, and cannot roll it back. Leave it out with this model."
        )
