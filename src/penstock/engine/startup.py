"""From options to workers that are ready, with the memory arithmetic in between."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import cast

from penstock.config import EngineConfig
from penstock.config.model import AUTO_LENGTH
from penstock.contract import KVCacheConfig
from penstock.contract.kv_cache import AnyKVCacheSpec
from penstock.errors import OutOfMemory
from penstock.executor import Executor, create_executor
from penstock.observability.units import format_bytes
from penstock.scheduler.kv_cache_plan import (
    bytes_to_serve,
    group_layers,
    longest_request_in_bytes,
    max_concurrency,
    plan_kv_cache,
)
from penstock.worker.memory_plan import MemoryPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StartedEngine:
    """Workers with their KV cache, and what was decided on the way."""

    config: EngineConfig
    executor: Executor
    memory_plan: MemoryPlan
    kv_cache_config: KVCacheConfig
    max_model_len: int

    def restart_workers(self) -> None:
        """Replace the workers by fresh ones with the same KV cache layout, empty."""
        self.executor.shutdown()
        self.executor = create_executor(self.config)
        self.executor.initialize_from_config(self.kv_cache_config, self.max_model_len)


def start_engine(config: EngineConfig) -> StartedEngine:
    """Start the workers, plan the memory and allocate the KV cache.

    Raises OutOfMemory with the arithmetic when it does not work out.
    """
    begin = time.monotonic()
    executor = create_executor(config)
    try:
        specs = cast(dict[str, AnyKVCacheSpec], executor.get_kv_cache_specs()[0])
        plan = min(executor.determine_available_memory(), key=lambda plan: plan.kv_cache_bytes)
        max_model_len = _choose_max_model_len(config, specs, plan)
        kv_cache_config = _plan_kv_cache(config, specs, plan, max_model_len)
        executor.initialize_from_config(kv_cache_config, max_model_len)
    except BaseException:
        executor.shutdown()
        raise
    concurrency = max_concurrency(
        kv_cache_config,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    logger.info(
        "KV cache: %s, %s blocks of %d tokens; %.1f requests of %s tokens at once",
        format_bytes(kv_cache_config.size_bytes),
        f"{kv_cache_config.num_blocks:,}",
        config.cache.block_size,
        concurrency,
        f"{max_model_len:,}",
    )
    logger.info("Ready in %.1f s", time.monotonic() - begin)
    return StartedEngine(config, executor, plan, kv_cache_config, max_model_len)


def _choose_max_model_len(config: EngineConfig, specs: dict[str, AnyKVCacheSpec], plan: MemoryPlan) -> int:
    """What was asked for; the model's own context; or, for "auto", what of that fits."""
    wanted = config.model.max_model_len
    if wanted is None:
        return config.model.longest_context
    if wanted != AUTO_LENGTH:
        return int(wanted)
    fits = longest_request_in_bytes(
        group_layers(specs),
        plan.kv_cache_bytes,
        limit=config.model.longest_context,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    if fits == 0:
        raise OutOfMemory(f"Not even a context of one token fits into what is left for the KV cache.\n{plan.table()}")
    logger.info("Context: %s of the model's %s tokens fit", f"{fits:,}", f"{config.model.longest_context:,}")
    return fits


def _plan_kv_cache(
    config: EngineConfig, specs: dict[str, AnyKVCacheSpec], plan: MemoryPlan, max_model_len: int
) -> KVCacheConfig:
    max_num_batched_tokens = config.scheduler.max_num_batched_tokens
    available = plan.kv_cache_bytes
    if plan.requested_kv_cache is None:
        available = min(available, _most_useful_bytes(config, specs, max_model_len))
    try:
        return plan_kv_cache(
            specs, available, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
        )
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}\n{plan.table()}") from error


def _most_useful_bytes(config: EngineConfig, specs: dict[str, AnyKVCacheSpec], max_model_len: int) -> int:
    """Room for every slot at full length, once more for cached prefixes: more would never be used."""
    one_request = bytes_to_serve(group_layers(specs), max_model_len, config.scheduler.max_num_batched_tokens)
    return 2 * config.scheduler.max_num_seqs * one_request
