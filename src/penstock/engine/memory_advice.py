"""Options with which an engine fits into memory, for the error of one that does not. Needs no torch and no worker."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from penstock.config import EngineConfig
from penstock.contract import KVCacheSpec
from penstock.errors import UnsupportedFeature
from penstock.scheduler.kv_cache_plan import bytes_to_serve, group_layers, longest_request_in_bytes
from penstock.worker.capabilities import allows_options
from penstock.worker.lighter_weights import saved_by_int8_weights
from penstock.worker.memory_plan import MemoryPlan


def options_that_fit(
    config: EngineConfig,
    specs: Mapping[str, KVCacheSpec],
    plan: MemoryPlan,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    available: int,
) -> str:
    """A sentence with each change of options by which a request of `max_model_len`, or a shorter one, fits.

    available: bytes of KV cache for all layers, of which the plan's worker has its share.
    """
    as_int8 = _with_int8_cache(config, specs)
    needed = bytes_to_serve(group_layers(specs), max_model_len, max_num_batched_tokens)
    needed_as_int8 = None if as_int8 is None else _bytes_to_serve(as_int8, max_model_len, max_num_batched_tokens)
    longest = longest_request_in_bytes(
        group_layers(specs), available, limit=max_model_len, max_num_batched_tokens=max_num_batched_tokens
    )
    # All layers' bytes of each byte that the plan's worker has.
    scale = available / plan.kv_cache_bytes if plan.kv_cache_bytes > 0 else 1.0
    found = [f"max_model_len={longest} or max_model_len='auto'"] if longest else []
    if needed_as_int8 is not None and needed_as_int8 <= available:
        found.append("kv_cache_dtype='int8'")
    found += _larger_cache(plan, math.ceil(needed / scale))
    lighter = replace(plan, weights=plan.weights - saved_by_int8_weights(config, plan.weights))
    if lighter.weights < plan.weights and plan.requested_kv_cache is None:
        if needed <= lighter.kv_cache_bytes * scale:
            found.append("quantization='int8'")
        elif needed_as_int8 is not None and available < needed_as_int8 <= lighter.kv_cache_bytes * scale:
            found.append("quantization='int8' with kv_cache_dtype='int8'")
    if not found:
        return "No other context length or dtype of the KV cache fits: free memory, or take a smaller model."
    return f"Any of these fits: {'; '.join(found)}."


def _bytes_to_serve(specs: Mapping[str, KVCacheSpec], max_model_len: int, max_num_batched_tokens: int) -> int | None:
    """Bytes of the smallest KV cache that serves such a request; None where these layers have no pages of one size."""
    try:
        groups = group_layers(specs)
    except UnsupportedFeature:
        return None
    return bytes_to_serve(groups, max_model_len, max_num_batched_tokens)


def _larger_cache(plan: MemoryPlan, needed: int) -> Iterator[str]:
    """Options that give the KV cache of this worker as many bytes, where the memory has them."""
    if needed > min(plan.free_at_start - plan.weights, replace(plan, is_default_fraction=True).left_for_kv_cache):
        return
    if plan.requested_kv_cache is None and not plan.is_default_fraction:
        fraction = math.ceil(100 * (needed + plan.without_kv_cache) / plan.total) / 100
        if fraction * plan.total <= plan.free_at_start + plan.process:
            yield f"memory_fraction={fraction:g}"
    yield f"kv_cache_memory_bytes={needed}"


def _with_int8_cache(config: EngineConfig, specs: Mapping[str, KVCacheSpec]) -> Mapping[str, KVCacheSpec] | None:
    """The layers with an int8 KV cache; None where they have one, or cannot."""
    kept = {name: getattr(spec, "dtype", None) for name, spec in specs.items()}
    if "int8" in kept.values() or not allows_options(
        replace(config, cache=replace(config.cache, kv_cache_dtype="int8"))
    ):
        return None
    return {
        name: spec if kept[name] is None else msgspec.structs.replace(spec, dtype="int8")
        for name, spec in specs.items()
    }
