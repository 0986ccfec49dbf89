"""Size of the KV cache and context length for a memory plan. Needs no torch and no worker."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from penstock.config import EngineConfig
from penstock.config.model import AUTO_LENGTH
from penstock.contract import KVCacheConfig, KVCacheSpec
from penstock.errors import OutOfMemory
from penstock.scheduler.kv_cache_plan import (
    bytes_to_serve,
    group_layers,
    longest_request,
    make_kv_cache_config,
    num_pools,
    plan_kv_cache,
)
from penstock.worker.capabilities import allows_options
from penstock.worker.memory_plan import MemoryPlan, saved_by_int8_weights

logger = logging.getLogger(__name__)


def specs_of_all(specs_by_rank: Iterable[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """Merge the KV cache specs of all stages, in their order."""
    return {name: spec for specs in specs_by_rank for name, spec in specs.items()}


def whole_kv_cache_bytes(specs_by_rank: Sequence[Mapping[str, KVCacheSpec]], plans: Sequence[MemoryPlan]) -> int:
    """Bytes of a KV cache over all layers whose part fits on every worker; the largest, if there is one pool."""
    groups = group_layers(specs_of_all(specs_by_rank))
    whole = make_kv_cache_config(groups, [1] * num_pools(groups))
    available = []
    for specs, plan in zip(specs_by_rank, plans, strict=True):
        pools = zip(whole.pools, whole.of_layers(specs).pools, strict=True)
        # As if all memory were of the pool of which the worker has most.
        parts = [plan.kv_cache_bytes * len(pool.tensors) // max(1, len(part.tensors)) for pool, part in pools]
        available.append(min(parts, default=plan.kv_cache_bytes))
    return min(available)


def choose_max_model_len(
    config: EngineConfig, specs: Mapping[str, KVCacheSpec], plan: MemoryPlan, available: int | None = None
) -> int:
    """Context length: `max_model_len`; by default the model's own; for "auto" the longest that fits.

    available: bytes for the KV cache of all layers; None takes the plan's.

    Raises OutOfMemory when not even one token fits.
    """
    wanted = config.model.max_model_len
    if wanted is None:
        return config.model.longest_context
    if wanted != AUTO_LENGTH:
        return int(wanted)
    fits = longest_request(
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
    """Plan the KV cache for the memory that the plan leaves, within the bound of `bound_kv_cache`.

    available: as in `choose_max_model_len`.

    Raises OutOfMemory, with the arithmetic, when one request of `max_model_len` does not fit.
    """
    max_num_batched_tokens = _most_new_tokens(config)
    available = plan.kv_cache_bytes if available is None else available
    available = bound_kv_cache(config, specs, plan, max_model_len, available).num_bytes
    try:
        return plan_kv_cache(
            specs,
            available,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
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


class KVCacheBound(NamedTuple):
    """Bytes of the KV cache of all layers at most. reason: what decides it, for the log and the plan."""

    num_bytes: int
    reason: str


def bound_kv_cache(
    config: EngineConfig, specs: Mapping[str, KVCacheSpec], plan: MemoryPlan, max_model_len: int, available: int
) -> KVCacheBound:
    """Size of the KV cache: what is asked for, else the least of what is left, of use to requests, and usual.

    Requests can use `max_num_seqs` times `max_model_len` tokens, and a prefix cache as much again. The usual share
    of the memory is exceeded where one request of `max_model_len` needs more. available: bytes that are left.
    """
    if plan.requested_kv_cache is not None:
        return KVCacheBound(available, "kv_cache_memory_bytes")
    one_request = bytes_to_serve(group_layers(specs), max_model_len, _most_new_tokens(config))
    num_seqs = config.scheduler.max_num_seqs
    copies, prefixes = (2, " and cached prefixes") if config.cache.enable_prefix_caching else (1, "")
    # Of the bytes of all layers, the plan's worker has its share.
    usual = int(plan.usual_fraction * plan.total * available / max(1, plan.kv_cache_bytes))
    by_default = KVCacheBound(usual, f"{plan.usual_fraction:g} of memory, the default")
    return min(
        KVCacheBound(available, "what is left for it" if plan.is_default_fraction else "memory_fraction"),
        max(by_default, KVCacheBound(one_request, f"one request of {max_model_len:,} tokens")),
        KVCacheBound(copies * num_seqs * one_request, f"what {num_seqs:,} requests{prefixes} can use"),
    )


def _most_new_tokens(config: EngineConfig) -> int:
    """Most new tokens of a request in a step, draft tokens included."""
    return config.scheduler.max_num_batched_tokens + config.speculative.num_lookahead_tokens


def options_that_fit(
    config: EngineConfig,
    specs: Mapping[str, KVCacheSpec],
    plan: MemoryPlan,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    available: int,
) -> str:
    """Sentence with each change of options by which a request of `max_model_len`, or a shorter one, fits.

    available: bytes of KV cache for all layers, of which the plan's worker has its share.
    """
    as_int8 = _with_int8_cache(config, specs)
    needed = bytes_to_serve(group_layers(specs), max_model_len, max_num_batched_tokens)
    needed_as_int8 = (
        None if as_int8 is None else bytes_to_serve(group_layers(as_int8), max_model_len, max_num_batched_tokens)
    )
    longest = longest_request(
        group_layers(specs), available, limit=max_model_len, max_num_batched_tokens=max_num_batched_tokens
    )
    # Ratio of the bytes of all layers to those of the plan's worker.
    scale = available / plan.kv_cache_bytes if plan.kv_cache_bytes > 0 else 1.0
    found = [f"max_model_len={longest} or max_model_len='auto'"] if longest else []
    if needed_as_int8 is not None and needed_as_int8 <= available:
        found.append("kv_cache_dtype='int8'")
    found += _larger_cache(plan, math.ceil(needed / scale))
    lighter = plan.with_term("weights", plan["weights"] - saved_by_int8_weights(config, plan["weights"]))
    if lighter["weights"] < plan["weights"] and plan.requested_kv_cache is None:
        if needed <= lighter.kv_cache_bytes * scale:
            found.append("quantization='int8'")
        elif needed_as_int8 is not None and available < needed_as_int8 <= lighter.kv_cache_bytes * scale:
            found.append("quantization='int8' with kv_cache_dtype='int8'")
    if not found:
        return "No other context length or dtype of the KV cache fits: free memory, or take a smaller model."
    return f"Any of these fits: {'; '.join(found)}."


def _larger_cache(plan: MemoryPlan, needed: int) -> Iterator[str]:
    """Options that give the KV cache of this worker `needed` bytes, if the memory has them."""
    if needed > min(plan.free_beside_weights, replace(plan, is_default_fraction=True).left_for_kv_cache):
        return
    if plan.requested_kv_cache is None and not plan.is_default_fraction:
        fraction = math.ceil(100 * (needed + plan.without_kv_cache) / plan.total) / 100
        if fraction * plan.total <= plan.free_or_held:
            yield f"memory_fraction={fraction:g}"
    yield f"kv_cache_memory_bytes={needed}"


def _with_int8_cache(config: EngineConfig, specs: Mapping[str, KVCacheSpec]) -> Mapping[str, KVCacheSpec] | None:
    """KV cache specs with int8 KV cache; None if they are int8 already, or cannot be."""
    kept = {name: getattr(spec, "dtype", None) for name, spec in specs.items()}
    if "int8" in kept.values() or not allows_options(
        replace(config, cache=replace(config.cache, kv_cache_dtype="int8"))
    ):
        return None
    return {
        name: spec if kept[name] is None else msgspec.structs.replace(spec, dtype="int8")
        for name, spec in specs.items()
    }
