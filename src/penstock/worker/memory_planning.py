"""Memory plan of one rank, from measured steps and counted sizes."""

from __future__ import annotations

import logging

import torch

from penstock.config import EngineConfig
from penstock.device import Device, DtypeChoice, MemorySnapshot
from penstock.models.attention_layers import most_query_heads
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.runner.model_runner import RunnerLimits
from penstock.runner.stage import num_noted_before, receive_buffer_bytes
from penstock.worker.drafter import layers_of_target
from penstock.worker.feature import WorkerFeatures, WorkerServices, memory_of_features
from penstock.worker.memory_plan import (
    MemoryPlan,
    StepMemory,
    affordable_fraction,
    check_plan,
    resident_step,
    saved_by_int8_weights,
)
from penstock.worker.profile import measure_logits_processors, measure_step_memory
from penstock.worker.split_contexts import split_context_bytes
from penstock.worker.unloaded_model import NotOnMeta, measure_unloaded
from penstock.worker.weights import Weights

logger = logging.getLogger(__name__)


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
    step = _measure_step(config, parallel, device, dtype, weights, limits, start)
    cache = config.cache
    available = start.free + start.used_by_process
    fraction, is_default = affordable_fraction(
        cache.memory_fraction, device.kind, total=start.total, available=available
    )
    plan = MemoryPlan(
        total=start.total,
        free_at_start=start.free,
        fraction=fraction,
        is_default_fraction=is_default,
        process=start.used_by_process,
        weights=weights.size_bytes,
        activations=step.activations,
        sampling=step.sampling,
        runner_state=step.runner_state,
        graphs=step.graphs,
        requested_kv_cache=cache.kv_cache_memory_bytes,
        logits_processors=measure_logits_processors(
            config.sampling,
            device,
            max_num_reqs=limits.max_num_reqs,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
        ),
        receive_buffer=receive_buffer_bytes(
            parallel.pipeline,
            limits.max_num_tokens,
            config.model.hidden_size,
            dtype.torch_dtype,
            num_noted_before(weights.speculator.aux_layers, layers_of_target(weights.model, parallel)),
        ),
        adapters=sum(memory_of_features(config, weights.language_model, device.kind, dtype.torch_dtype).values()),
    )
    for line in ["Memory plan:", *plan.table().splitlines()]:
        logger.debug("%s", line)
    if cache.kv_cache_memory_bytes is None and device.kind != "cpu":
        logger.info("kv_cache_memory_bytes=%d asks for a KV cache of this size", plan.kv_cache_bytes)
    # A replacement of a lost core is not checked: other engines may have taken free memory since the first start.
    if not config.replaces_lost_core:
        check_plan(plan, saved_by_int8_weights(config, plan.weights))
    return plan


def _measure_step(
    config: EngineConfig,
    parallel: ParallelState,
    device: Device,
    dtype: DtypeChoice,
    weights: Weights,
    limits: RunnerLimits,
    start: MemorySnapshot,
) -> StepMemory:
    tensors = _measure_without_memory(config, parallel, dtype, limits) if device.kind == "cpu" else None
    if tensors is None:
        services = WorkerServices(config, device, weights.language_model, dtype.torch_dtype, limits.max_num_reqs + 1)
        tensors = measure_step_memory(
            device,
            weights.language_model,
            weights.layers,
            weights.kv_cache_specs,
            limits,
            config.device.attention_backend,
            config.sampling,
            fast_paths=config.scheduler.fast_paths != "off",
            graphs=config.graphs,
            speculator=weights.speculator,
            make_owners=lambda: WorkerFeatures(services, is_profile=True).owners,
        )
    # Free memory in torch's cache is not available to the KV cache.
    device.return_unused_memory()
    split = split_context_bytes(
        weights.kv_cache_specs.values(),
        most_query_heads(weights.layers),
        max_model_len=limits.max_model_len,
        num_threads=torch.get_num_threads(),
        device=device.kind,
    )
    library_bytes = device.library_bytes(start)
    if library_bytes < 0:
        logger.warning(
            "Other processes freed %s of the device's memory while this engine measured its own. The KV cache does not "
            "count on it; start again to use it.",
            format_bytes(-library_bytes),
        )
    return resident_step(tensors, device.kind, split, library_bytes)


def _measure_without_memory(
    config: EngineConfig, parallel: ParallelState, dtype: DtypeChoice, limits: RunnerLimits
) -> StepMemory | None:
    """Measure full steps on meta tensors, since they take long on a CPU; None if they must be run."""
    try:
        return measure_unloaded(config, parallel, "cpu", dtype, limits).step
    except NotOnMeta as reason:
        logger.info("Full steps are run to measure their memory: %s", reason)
        return None
