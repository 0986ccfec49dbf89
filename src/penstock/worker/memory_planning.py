"""Memory plan of one rank: built alike from loaded weights and from a model without them (`penstock plan`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from penstock.config import EngineConfig
from penstock.contract import KVCacheSpec
from penstock.device import Device, DtypeChoice, MemorySnapshot
from penstock.device.limits import USUAL_MEMORY_FRACTION
from penstock.models.attention_layers import most_query_heads
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.runner.model_runner import RunnerLimits
from penstock.worker.feature import WorkerServices
from penstock.worker.memory_plan import (
    MemoryPlan,
    MemoryTerm,
    affordable_fraction,
    bytes_of,
    check_plan,
    most_for_weights,
    offloaded_bytes,
    resident_terms,
    saved_by_int8_weights,
    split_offloaded,
    with_size,
)
from penstock.worker.profile import measure_logits_processors, measure_step, terms_of_model
from penstock.worker.split_contexts import split_context_bytes
from penstock.worker.unloaded_model import NotOnMeta, measure_unloaded
from penstock.worker.weight_cache import check_offload, may_offload
from penstock.worker.weights import Weights

logger = logging.getLogger(__name__)


def make_plan(
    config: EngineConfig,
    kind: str,
    memory: MemorySnapshot,
    tensors: tuple[MemoryTerm, ...],
    specs: Mapping[str, KVCacheSpec],
    limits: RunnerLimits,
    *,
    num_heads: int,
    num_threads: int,
    logits_processors: int,
    library_bytes: int = 0,
    offloaded: int | None = None,
) -> MemoryPlan:
    """Plan the memory. kind: of the device. memory: before the model was loaded. tensors: `terms_of_model`.

    specs: KV cache spec by layer. num_heads: maximum query heads of a layer. logits_processors: bytes of custom ones.
    library_bytes: memory of libraries, where it was measured. offloaded: bytes of weights that stay in a file; None
    plans them. Raises UnsupportedArgument where they cannot.
    """
    check_offload(config.load)
    split_contexts = split_context_bytes(
        specs.values(), num_heads, max_model_len=limits.max_model_len, num_threads=num_threads, device=kind
    )
    fraction, is_default = affordable_fraction(
        config.cache.memory_fraction, kind, total=memory.total, available=memory.free + memory.used_by_process
    )
    if offloaded is None:
        offloaded = _planned_offload(config, kind, memory, bytes_of(tensors, "weights"))
    tensors = split_offloaded(tensors, offloaded)
    terms = (
        MemoryTerm("process", memory.used_by_process, "held before loading"),
        *resident_terms(tensors, kind, split_contexts, library_bytes),
        MemoryTerm("logits_processors", logits_processors, "custom logits processors"),
    )
    return MemoryPlan(
        memory.total,
        memory.free,
        fraction,
        terms,
        config.cache.kv_cache_memory_bytes,
        is_default_fraction=is_default,
        usual_fraction=USUAL_MEMORY_FRACTION[kind] if config.cache.memory_fraction is None else 1.0,
    )


def _planned_offload(config: EngineConfig, kind: str, memory: MemorySnapshot, weights: int) -> int:
    """Bytes of weights that would stay in a file."""
    if not may_offload(config.model, config.load, kind):
        return 0
    most = most_for_weights(config.cache.memory_fraction, memory.total, memory.free, memory.used_by_process)
    return offloaded_bytes(config.load.offloaded_bytes, weights, most)


def plan_memory(
    config: EngineConfig,
    parallel: ParallelState,
    device: Device,
    dtype: DtypeChoice,
    weights: Weights,
    limits: RunnerLimits,
    start: MemorySnapshot,
) -> MemoryPlan:
    """Measure a step and plan the memory. start: snapshot before the model was loaded.

    Raises OutOfMemory when the plan does not fit.
    """
    tensors = _measure_without_memory(config, parallel, dtype, limits) if device.kind == "cpu" else None
    if tensors is None:
        services = WorkerServices(config, device, weights.language_model, dtype.torch_dtype)
        step = measure_step(services, weights.layers, weights.kv_cache_specs, limits, weights.speculator)
        tensors = terms_of_model(services, parallel, weights.size_bytes, step, limits, weights.speculator)
    # Free memory in torch's cache is not available to the KV cache.
    device.return_unused_memory()
    library_bytes = device.library_bytes(start)
    if library_bytes < 0:
        logger.warning(
            "Other processes freed %s of the device's memory while this engine measured its own. The KV cache does not "
            "count on it; start again to use it.",
            format_bytes(-library_bytes),
        )
    plan = make_plan(
        config,
        device.kind,
        start,
        with_size(tensors, "weights", weights.size_bytes - bytes_of(tensors, "encoder_weights")),
        weights.kv_cache_specs,
        limits,
        num_heads=most_query_heads(weights.layers),
        num_threads=torch.get_num_threads(),
        logits_processors=measure_logits_processors(config.sampling, device, limits),
        library_bytes=library_bytes,
        offloaded=weights.mapped_bytes,
    )
    for line in ["Memory plan:", *plan.table().splitlines()]:
        logger.debug("%s", line)
    if config.cache.kv_cache_memory_bytes is None and device.kind != "cpu":
        logger.info("kv_cache_memory_bytes=%d asks for a KV cache of this size", plan.kv_cache_bytes)
    # A replacement of a lost core is not checked: other engines may have taken free memory since the first start.
    if not config.replaces_lost_core:
        check_plan(plan, saved_by_int8_weights(config, plan["weights"]))
    return plan


def _measure_without_memory(
    config: EngineConfig, parallel: ParallelState, dtype: DtypeChoice, limits: RunnerLimits
) -> tuple[MemoryTerm, ...] | None:
    """Measure full steps on meta tensors, since they take long on a CPU; None if they must be run."""
    try:
        return measure_unloaded(config, parallel, "cpu", dtype, limits).terms
    except NotOnMeta as reason:
        logger.info("Full steps are run to measure their memory: %s", reason)
        return None
