"""The memory of an engine that is not running: the arithmetic of `worker/memory_plan.py` without a worker.

The model is built and run without memory, as the worker does when it plans; of the weight files only the headers are
read.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.config import EngineConfig, env
from penstock.config.resolve import resolve_metadata_folder
from penstock.contract import AttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec
from penstock.device.cpu import CpuDevice
from penstock.device.cuda import gpu_memory
from penstock.device.dtypes import DtypeChoice, choose_cpu_dtype, choose_cuda_dtype, choose_kv_cache_dtype
from penstock.device.limits import MemoryLimit, cpu_quota, memory_limit
from penstock.device.threads import plan_threads
from penstock.engine.kv_cache_size import choose_max_model_len, size_kv_cache
from penstock.errors import CheckpointError, ModelNotFound, OutOfMemory, UnsupportedArgument, UnsupportedFeature
from penstock.loader.headers import fetch_headers
from penstock.loader.loader import open_weights, stored_dtype, without_memory
from penstock.loader.weight_files import has_weight_files
from penstock.models.registry import refuse_unsuitable
from penstock.observability.units import format_bytes
from penstock.parallel import ParallelContext
from penstock.parallel.local_ranks import join_local_ranks, share_memory
from penstock.runner.model_runner import RunnerLimits
from penstock.runner.sampling.load_processors import installed
from penstock.scheduler.kv_cache_plan import max_concurrency, num_tokens_that_fit
from penstock.worker.capabilities import check_options
from penstock.worker.memory_plan import MemoryPlan, affordable_fraction, check_plan
from penstock.worker.processor_memory import measure_processors
from penstock.worker.resident import PROCESS_BYTES, resident_step
from penstock.worker.split_contexts import split_context_bytes
from penstock.worker.unloaded_model import UnloadedModel, measure_unloaded


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """layers: what each keeps. memory: the arithmetic, as each worker would print it. kv_bytes_per_token: in all layers
    together, where none has a window. concurrency: requests of `max_model_len` tokens at once. num_tokens: in requests
    of that length. lookup_bytes: of weights of which a step reads no more than its tokens' rows. num_workers: that
    have a share of every layer; all but `engine_bytes` is said of one of them.
    """

    model: str
    architecture: str
    device: str
    dtype: DtypeChoice
    layers: tuple[KVCacheSpec, ...]
    num_parameters: int
    lookup_bytes: int
    memory: MemoryPlan
    block_size: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    kv_cache: KVCacheConfig
    max_model_len: int
    num_tokens: int
    concurrency: float
    num_workers: int = 1
    num_engines: int = 1

    def table(self) -> str:
        """All of it, for a person to check."""
        in_all = f"In all, once the KV cache is filled: {format_bytes(self.engine_bytes)}"
        if self.num_engines > 1:
            total = format_bytes(self.num_engines * self.engine_bytes)
            in_all += f" for an engine, {total} for {self.num_engines} engines"
        whose = "" if self.num_workers == 1 else f" of each of {self.num_workers} workers"
        memory, cache = [f"Memory{whose}", self.memory.table()], [f"KV cache{whose}", *self._cache_lines()]
        return "\n".join([*self._model_lines(), "", *memory, "", *cache, "", in_all])

    @property
    def engine_bytes(self) -> int:
        """What all workers of an engine take together, once their KV cache is filled and full steps have run."""
        return self.num_workers * (self.memory.without_kv_cache + self.kv_cache.size_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        memory = asdict(self.memory)
        memory |= {"budget": self.memory.budget, "left_for_kv_cache": self.memory.left_for_kv_cache}
        return {
            "model": self.model,
            "architecture": self.architecture,
            "device": self.device,
            "dtype": self.dtype.name,
            "weights_dtype": self.dtype.weights,
            "num_parameters": self.num_parameters,
            "max_model_len": self.max_model_len,
            "num_workers": self.num_workers,
            "num_engines": self.num_engines,
            "engine_bytes": self.engine_bytes,
            "memory": memory,
            "kv_cache": {
                "bytes": self.kv_cache.size_bytes,
                "dtype": self.kv_cache_dtype,
                "bytes_per_token": self.kv_bytes_per_token,
                "block_size": self.block_size,
                "num_blocks": self.kv_cache.num_blocks,
                "num_tokens": self.num_tokens,
                "num_full_length_requests": round(self.concurrency, 2),
            },
        }

    def _model_lines(self) -> list[str]:
        windows = sum(isinstance(layer, SlidingWindowSpec) for layer in self.layers)
        layers = f"{len(self.layers)} layers" + (f" ({windows} with a window)" if windows else "")
        where = "" if self.num_workers == 1 else " on each worker"
        return [
            f"{self.model}: {self.architecture}, {self.num_parameters / 1e6:,.1f} million parameters{where}, {layers}",
            f"on {self.device} in {self.dtype.name} ({self.dtype.reason})",
        ]

    def _cache_lines(self) -> list[str]:
        attention = [layer for layer in self.layers if isinstance(layer, AttentionSpec)]
        heads = Counter((layer.num_kv_heads, layer.head_size) for layer in attention)
        sizes = [f"2 x {num_heads} heads x {size} x {count} layers" for (num_heads, size), count in heads.items()]
        per_token = f"{' + '.join(sizes)} in {self.kv_cache_dtype}"
        rows = [
            ("size", format_bytes(self.kv_cache.size_bytes), ""),
            ("per token", format_bytes(self.kv_bytes_per_token), per_token),
            ("blocks", f"{self.kv_cache.num_blocks:,}", f"of {self.block_size} tokens, one of them empty"),
            ("tokens that fit", f"{self.num_tokens:,}", ""),
            ("full-length requests", f"{self.concurrency:,.1f}", f"of {self.max_model_len:,} tokens, at once"),
        ]
        return [f"  {name:<34}  {value:>10}  {note}".rstrip() for name, value, note in rows]


def plan_engine(model: str | Path, *, revision: str | None = None, **options: Any) -> EnginePlan:
    """Plan an engine with these options (those of `EngineConfig.create`) on this machine, as it is now.

    Of a hub id that is not in the local cache, the configuration and the headers are fetched, and no weights.
    Raises OutOfMemory when the engine could not start, and what loading the model raises.
    """
    folder, is_on_hub = resolve_metadata_folder(model, revision)
    config = EngineConfig.create(str(folder), **options)
    check_options(config)
    stages = config.parallel.pipeline_parallel_size
    if stages > 1:
        raise UnsupportedArgument(
            f"pipeline_parallel_size={stages}: a plan is for workers that share every layer so far. Plan without it; "
            "each stage has about that share of the weights and of the KV cache."
        )
    refuse_unsuitable(config.model)
    device = _choose_device(config.device.device)
    tensors = _tensors(str(model), revision, config, is_on_hub=is_on_hub)
    dtype = _choose_dtype(config, None if tensors is None else stored_dtype(tensors), device)
    kv_cache_dtype = choose_kv_cache_dtype(config.cache.kv_cache_dtype, dtype.name, device)
    limits = _limits(config)
    unloaded = measure_unloaded(config, _first_rank(config), device, dtype, limits, tensors)
    memory, specs = _plan_memory(config, unloaded, limits, device), unloaded.specs
    kv_bytes_per_token = sum(spec.page_size_bytes // spec.block_size for spec in specs.values())
    try:
        check_plan(memory)
        max_model_len = choose_max_model_len(config, specs, memory)
        kv_cache = size_kv_cache(config, specs, memory, max_model_len)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}\n  A token takes {format_bytes(kv_bytes_per_token)} of KV cache.") from error
    lengths = {"max_model_len": max_model_len, "max_num_batched_tokens": limits.max_num_tokens}
    return EnginePlan(
        model=str(model),
        architecture=config.model.architecture,
        device=device,
        dtype=dtype,
        layers=tuple(specs.values()),
        num_parameters=unloaded.num_parameters,
        lookup_bytes=unloaded.lookups,
        memory=memory,
        block_size=config.cache.block_size,
        kv_cache_dtype=kv_cache_dtype,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_cache=kv_cache,
        max_model_len=max_model_len,
        num_tokens=num_tokens_that_fit(kv_cache, **lengths),
        concurrency=max_concurrency(kv_cache, **lengths),
        num_workers=config.parallel.world_size,
        num_engines=config.parallel.num_engines_here,
    )


def _first_rank(config: EngineConfig) -> ParallelContext:
    """A worker's place that has an equal share of all; it meets nobody, since nothing that is planned has values."""
    memory = share_memory(config.parallel)
    try:
        return join_local_ranks(0, config.parallel, memory)
    finally:
        os.close(memory)


def _tensors(
    model: str, revision: str | None, config: EngineConfig, *, is_on_hub: bool
) -> list[tuple[str, Tensor]] | None:
    """The checkpoint's, without memory; None for random weights. Of what is on the hub alone, by its headers."""
    if config.load.load_format == "dummy":
        return None
    quiet = replace(config.load, use_tqdm_on_load=False)
    try:
        return list(without_memory(open_weights(config.model.folder, quiet, ParallelContext())))
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
    (_, num_ranks), cache = config.parallel.place(0), config.cache
    limit = _memory_of(device, num_ranks)
    threads = plan_threads(config.device.num_threads, quota=cpu_quota(), num_ranks=num_ranks)
    split = split_context_bytes(
        model.specs.values(),
        model.num_heads,
        max_model_len=limits.max_model_len,
        num_threads=threads.num_threads,
        device=device,
    )
    step = resident_step(model.step, device, split)
    available = limit.free_bytes + PROCESS_BYTES[device]
    fraction, is_default = affordable_fraction(
        cache.memory_fraction, device, total=limit.total_bytes, available=available
    )
    return MemoryPlan(
        total=limit.total_bytes,
        free_at_start=limit.free_bytes,
        fraction=fraction,
        is_default_fraction=is_default,
        process=PROCESS_BYTES[device],
        weights=model.weights,
        activations=step.activations,
        sampling=step.sampling,
        runner_state=step.runner_state,
        requested_kv_cache=cache.kv_cache_memory_bytes,
        logits_processors=_plan_processors(config, limits),
    )


def _plan_processors(config: EngineConfig, limits: RunnerLimits) -> int:
    """What custom logits processors keep; they are made, where there are any."""
    if not config.sampling.logits_processors and not installed():
        return 0
    with closing(CpuDevice(config.device.num_threads)) as device:
        return measure_processors(
            config.sampling,
            device,
            max_num_reqs=limits.max_num_reqs,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
        )


def _limits(config: EngineConfig) -> RunnerLimits:
    wanted = config.model.max_model_len
    return RunnerLimits(
        max_num_reqs=config.scheduler.max_num_seqs,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=wanted if isinstance(wanted, int) else config.model.longest_context,
        vocab_size=config.model.vocab_size,
        max_drafts=config.speculative.num_speculative_tokens,
    )


def _memory_of(device: str, num_ranks: int) -> MemoryLimit:
    """Each rank's: ranks share the memory of a CPU machine, and have a GPU each."""
    if device == "cpu":
        limit = memory_limit()
        return MemoryLimit(limit.total_bytes // num_ranks, limit.free_bytes // num_ranks)
    memory = gpu_memory()
    if memory is None:
        raise UnsupportedFeature(
            "device='cuda' is not available: no NVIDIA driver, or a torch without CUDA. Use device='cpu'."
        )
    return memory
