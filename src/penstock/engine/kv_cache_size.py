"""How much of the memory plan becomes KV cache, and for how long a context. Needs no torch and no worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from penstock.config import EngineConfig
from penstock.config.model import AUTO_LENGTH
from penstock.contract import KVCacheConfig, KVCacheSpec
from penstock.engine.memory_advice import options_that_fit
from penstock.errors import OutOfMemory
from penstock.scheduler.kv_cache_plan import (
    bytes_to_serve,
    group_layers,
    longest_request_in_bytes,
    make_kv_cache_config,
    plan_kv_cache,
)
from penstock.worker.memory_plan import MemoryPlan

logger = logging.getLogger(__name__)


def specs_of_all(specs_by_rank: Iterable[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """The layers of all stages, in their order."""
    return {name: spec for specs in specs_by_rank for name, spec in specs.items()}


def whole_kv_cache_bytes(specs_by_rank: Sequence[Mapping[str, KVCacheSpec]], plans: Sequence[MemoryPlan]) -> int:
    """Of the largest KV cache of all layers of which every worker has room for its own."""
    groups = group_layers(specs_of_all(specs_by_rank))
    tensors = make_kv_cache_config(groups, num_blocks=1).tensors
    return min(
        plan.kv_cache_bytes * len(tensors) // max(1, sum(any(map(specs.__contains__, t.shared_by)) for t in tensors))
        for specs, plan in zip(specs_by_rank, plans, strict=True)
    )


def choose_max_model_len(
    config: EngineConfig, specs: Mapping[str, KVCacheSpec], plan: MemoryPlan, available: int | None = None
) -> int:
    """What was asked for; the model's own context; or, for "auto", what of that fits.

    available: bytes for the KV cache of all layers; None takes the plan's.

    Raises OutOfMemory when not even one token fits.
    """
    wanted = config.model.max_model_len
    if wanted is None:
        return config.model.longest_context
    if wanted != AUTO_LENGTH:
        return int(wanted)
    fits = longest_request_in_bytes(
        group_layers(specs),
        plan.kv_cache_bytes if available is None else available,
        limit=config.model.longest_context,
        max_num_batched_tokens=_most_new_tokens(config),
    )
    if fits == 0:
        raise OutOfMemory(f"Not even a context of one token fits into what is left for the KV cache.\n{plan.table()}")
    logger.info("Context: %s of the model's %s tokens fit", f"{fits:,}", f"{config.model.longest_context:,}")
    return fits


def size_kv_cache(
    config: EngineConfig,
    specs: Mapping[str, KVCacheSpec],
    plan: MemoryPlan,
    max_model_len: int,
    available: int | None = None,
) -> KVCacheConfig:
    """The KV cache that fills what the plan leaves for it, but not more than could ever be used.

    available: as in `choose_max_model_len`.

    Raises OutOfMemory, with the arithmetic, when one request of `max_model_len` does not fit.
    """
    max_num_batched_tokens = _most_new_tokens(config)
    available = plan.kv_cache_bytes if available is None else available
    if plan.requested_kv_cache is None:
        available = min(available, _most_useful_bytes(config, specs, max_model_len))
    try:
        return plan_kv_cache(
            specs, available, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
        )
    except OutOfMemory as error:
        advice = options_that_fit(
            config,
            specs,
            plan,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            available=available,
        )
        raise OutOfMemory(f"{error} {advice}\n{plan.table()}") from error


def _most_useful_bytes(config: EngineConfig, specs: Mapping[str, KVCacheSpec], max_model_len: int) -> int:
    """Room for every slot at full length, once more for cached prefixes: more would never be used."""
    one_request = bytes_to_serve(group_layers(specs), max_model_len, _most_new_tokens(config))
    return 2 * config.scheduler.max_num_seqs * one_request


def _most_new_tokens(config: EngineConfig) -> int:
    """Of a request in a step, those that are only guessed included."""
    return config.scheduler.max_num_batched_tokens + config.speculative.num_lookahead_tokens
