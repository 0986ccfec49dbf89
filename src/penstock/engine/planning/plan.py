"""Memory planning of an engine that is not running: `worker/memory_plan.py` without a worker.

The model is built and run on the meta device, as the worker does when it plans; only the headers of the weight files
are read.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoints.quantized_checkpoint import quantization_of_checkpoint
from penstock.checkpoints.resolve import resolve_metadata_folder
from penstock.config import EngineConfig, ModelConfig
from penstock.config.model import NO_QUANTIZATION
from penstock.device import MemorySnapshot
from penstock.device.cpu import CpuDevice
from penstock.device.cuda import gpu_memory
from penstock.device.dtypes import DtypeChoice, choose_cpu_dtype, choose_cuda_dtype
from penstock.device.limits import MemoryLimit, cpu_quota, memory_limit
from penstock.device.threads import plan_threads
from penstock.engine.planning.engine_plan import EnginePlan, StagePlan, kv_bytes_per_token
from penstock.engine.planning.kv_cache_size import (
    bound_kv_cache,
    choose_max_model_len,
    size_kv_cache,
    specs_of_all,
    whole_kv_cache_bytes,
)
from penstock.errors import CheckpointError, ModelNotFound, OutOfMemory, UnsupportedFeature
from penstock.loader.headers import fetch_headers
from penstock.loader.loader import check_parallel_sizes, peek_weights, stored_dtype
from penstock.loader.weight_files import has_weight_files
from penstock.models.registry import refuse_unsuitable
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelState
from penstock.parallel.local_ranks import join_local_ranks, share_memory
from penstock.runner.model_runner import RunnerLimits
from penstock.runner.sampling.load_processors import installed
from penstock.scheduler.kv_cache_plan import max_concurrency, num_tokens_that_fit
from penstock.system import env
from penstock.worker.capabilities import check_options
from penstock.worker.memory_plan import PROCESS_BYTES, MemoryPlan, check_plan, saved_by_int8_weights
from penstock.worker.memory_planning import make_plan
from penstock.worker.profile import measure_logits_processors
from penstock.worker.unloaded_model import UnloadedModel, measure_unloaded


def plan_engine(model: str | Path, *, revision: str | None = None, **options: Any) -> EnginePlan:
    """Plan an engine with these options (those of `EngineConfig.create`) on this machine, as it is now.

    For a hub id that is not in the local cache, the configuration and the headers are fetched, and no weights.
    Raises OutOfMemory when the engine could not start, and what loading the model raises.
    """
    folder, is_on_hub = resolve_metadata_folder(model, revision)
    # A shipped model keeps its name, by which its EAGLE-3 head is found.
    config = EngineConfig.create(str(folder) if is_on_hub else model, **options)
    refuse_unsuitable(config.model)
    device = _choose_device(config.device.device)
    check_options(config, device)
    check_parallel_sizes(config)
    tensors = _tensors(str(model), revision, config, is_on_hub=is_on_hub)
    dtype = _choose_dtype(config, None if tensors is None else stored_dtype(tensors), device)
    limits = RunnerLimits.of(config, config.model.planned_context)
    places = _first_ranks(config)
    stages = [measure_unloaded(config, place, device, dtype, limits, tensors) for place in places]
    plans = [_plan_memory(config, stage, limits, device) for stage in stages]
    specs = specs_of_all(stage.specs for stage in stages)
    available, tightest = whole_kv_cache_bytes([stage.specs for stage in stages], plans), min(plans, key=_room)
    try:
        for plan in plans:
            check_plan(plan, saved_by_int8_weights(config, plan["weights"]))
        max_model_len = choose_max_model_len(config, specs, tightest, available)
        kv_cache = size_kv_cache(config, specs, tightest, max_model_len, available)
    except OutOfMemory as error:
        per_token = format_bytes(kv_bytes_per_token(tuple(specs.values())))
        raise OutOfMemory(f"{error}\n  A token takes {per_token} of KV cache.") from error
    reason = bound_kv_cache(config, specs, tightest, max_model_len, available).reason
    lengths = {"max_model_len": max_model_len, "max_num_batched_tokens": limits.max_num_tokens}
    return EnginePlan(
        model=str(model),
        architecture=config.model.architecture,
        device=device,
        dtype=dtype,
        stages=tuple(
            StagePlan(stage.specs, stage.num_parameters, stage.lookups, plan, kv_cache.of_layers(stage.specs))
            for stage, plan in zip(stages, plans, strict=True)
        ),
        block_size=config.cache.block_size,
        kv_cache_dtype=stages[0].kv_cache_dtype,
        kv_cache=kv_cache,
        kv_cache_reason=reason,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_tokens=num_tokens_that_fit(kv_cache, **lengths),
        concurrency=max_concurrency(kv_cache, **lengths),
        num_workers=config.parallel.tensor_parallel_size,
        num_engines=config.parallel.num_engines_here,
        quantization=_quantization(config.model),
        products=stages[0].products,
    )


def _quantization(model: ModelConfig) -> str | None:
    option = None if model.quantization == NO_QUANTIZATION else model.quantization
    return option or quantization_of_checkpoint(model.hf_config)


def _room(plan: MemoryPlan) -> int:
    return plan.kv_cache_bytes


def _first_ranks(config: EngineConfig) -> list[ParallelState]:
    """`ParallelState` of each stage's first rank; meta tensors need no communication, so no other rank joins."""
    parallel = config.parallel
    memory = share_memory(parallel)
    try:
        return [
            join_local_ranks(rank, parallel, memory)
            for rank in range(0, parallel.world_size, parallel.tensor_parallel_size)
        ]
    finally:
        os.close(memory)


def _tensors(
    model: str, revision: str | None, config: EngineConfig, *, is_on_hub: bool
) -> list[tuple[str, Tensor]] | None:
    """Meta tensors of the checkpoint, or of its headers on the hub; None for random weights."""
    if config.load.load_format == "dummy":
        return None
    try:
        return list(peek_weights(config.model.folder, config.load, ParallelState()))
    except CheckpointError:
        if not is_on_hub or has_weight_files(config.model.folder):
            raise
    if env.hub_is_offline():
        raise ModelNotFound(
            f"model={model!r}: its weight files are not in the local hub cache, and the network is forbidden "
            "(HF_HUB_OFFLINE), so their headers cannot be read."
        )
    return fetch_headers(model, revision)


def _choose_device(requested: str) -> str:
    if requested != "auto":
        return requested
    return "cuda" if gpu_memory() is not None else "cpu"


def _choose_dtype(config: EngineConfig, stored: str | None, device: str) -> DtypeChoice:
    model = config.model
    if device == "cuda":
        return choose_cuda_dtype(model.dtype, model.checkpoint_dtype)
    return choose_cpu_dtype(model.dtype, model.checkpoint_dtype, stored)


def _plan_memory(config: EngineConfig, model: UnloadedModel, limits: RunnerLimits, device: str) -> MemoryPlan:
    _, num_ranks = config.parallel.place(0)
    limit = _memory_of(device, num_ranks)
    threads = plan_threads(config.device.num_threads, quota=cpu_quota(), num_ranks=num_ranks)
    return make_plan(
        config,
        device,
        MemorySnapshot(limit.total_bytes, limit.free_bytes, PROCESS_BYTES[device]),
        model.terms,
        model.specs,
        limits,
        num_heads=model.num_heads,
        num_threads=threads.num_threads,
        logits_processors=_plan_processors(config, limits),
    )


def _plan_processors(config: EngineConfig, limits: RunnerLimits) -> int:
    """Bytes of state of custom logits processors, measured by creating them."""
    if not config.sampling.logits_processors and not installed():
        return 0
    with closing(CpuDevice(config.device.num_threads)) as device:
        return measure_logits_processors(config.sampling, device, limits)


def _memory_of(device: str, num_ranks: int) -> MemoryLimit:
    """Memory limit per rank: ranks share the memory of a CPU machine, and have a GPU each."""
    if device == "cpu":
        limit = memory_limit()
        return MemoryLimit(limit.total_bytes // num_ranks, limit.free_bytes // num_ranks)
    memory = gpu_memory()
    if memory is None:
        raise UnsupportedFeature(
            "device='cuda' is not available: no NVIDIA driver, or a torch without CUDA. Use device='cpu'."
        )
    return memory
