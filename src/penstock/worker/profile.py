"""Memory terms of a model: of steps, measured on a temporary runner, and of custom logits processors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.attention import CacheLayer
from penstock.config import SamplingConfig
from penstock.contract import KVCacheConfig, KVCacheGroupSpec, KVCachePool, KVCacheSpec, KVCacheTensor
from penstock.device import Device
from penstock.layers.linear import weights_size_bytes
from penstock.parallel import ParallelState
from penstock.runner.dummy_runs import (
    run_largest_graph,
    run_largest_mixed_graph,
    run_longest_prompt,
    run_longest_prompt_of_drafter,
)
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.runner.sampling import ProcessorContext
from penstock.runner.sampling.custom_processors import CustomProcessors
from penstock.runner.sampling.load_processors import load_logits_processors
from penstock.runner.sampling.thinking_budget import ThinkingBudget
from penstock.runner.speculative import NO_SPECULATOR, Speculator
from penstock.runner.stage import num_noted_before, receive_buffer_bytes
from penstock.worker.drafter import layers_of_target
from penstock.worker.feature import WorkerFeatures, WorkerServices, measure_runs, memory_of_features
from penstock.worker.memory_plan import MemoryTerm

# Of cuBLAS for the stream that graphs are captured on, on Hopper.
_WORKSPACE_BYTES = 32 << 20


def measure_step(
    services: WorkerServices,
    layers: Mapping[str, CacheLayer],
    specs: Mapping[str, KVCacheSpec],
    limits: RunnerLimits,
    speculator: Speculator = NO_SPECULATOR,
) -> list[MemoryTerm]:
    """Measure the tensors of the largest steps, and the buffers of the runner.

    Without custom logits processors and features whose memory is known, which are terms of their own.
    """
    engine, device = services.config, services.device
    with torch.no_grad():
        num_tokens = limits.max_num_tokens + speculator.most_extra_tokens(limits.max_num_reqs)
        config = throwaway_kv_cache(specs, num_tokens)
        with device.measure_peak() as made:
            features = WorkerFeatures(services, is_profile=True)
            runner = ModelRunner(
                device,
                services.model,
                layers,
                config,
                limits,
                attention_backend=engine.device.attention_backend,
                sampling=engine.sampling,
                logits_processors=(),
                fast_paths=engine.scheduler.fast_paths != "off",
                graphs=engine.graphs,
                speculator=speculator,
                model_state=features.model_state,
                owners=features.owners,
                transforms=features.transforms,
                make_head=features.output_head,
            )
            head = runner.head
            # Includes tables that are allocated on first use.
            head.profile(num_reqs=1, num_rows=min(1 + limits.max_drafts, limits.max_num_tokens))
        with device.measure_peak() as forward:
            hidden_TD = run_longest_prompt(runner, limits.max_num_tokens)
        drafted = hidden_TD.nbytes + _peak(device, lambda: run_longest_prompt_of_drafter(runner, limits.max_num_tokens))
        num_reqs = limits.max_num_reqs
        num_rows = max(num_reqs, min(num_reqs * (1 + limits.max_drafts), limits.max_num_tokens))
        of_requests = _peak(device, lambda: head.profile(num_reqs, num_rows))
        of_prompt = _peak(device, lambda: head.profile_prompt(services.model, hidden_TD))
        captured = _measure_graphs(device, runner)
        of_features = measure_runs(services)
        features.close()
    return [
        MemoryTerm("activations", max(forward.bytes_above_start, drafted), "activations", is_temporary=True),
        MemoryTerm(head.memory_name, max(of_requests, of_prompt), head.memory_why, is_temporary=True),
        MemoryTerm("runner_state", made.bytes_kept - config.size_bytes, "request state"),
        MemoryTerm("graphs", captured, "CUDA graphs"),
        *of_features,
    ]


def terms_of_model(
    services: WorkerServices,
    parallel: ParallelState,
    weights_bytes: int,
    step: Sequence[MemoryTerm],
    limits: RunnerLimits,
    speculator: Speculator,
) -> tuple[MemoryTerm, ...]:
    """Return the terms of a model on one rank. weights_bytes: of all weights. step: `measure_step`."""
    config, model = services.config, services.model
    encoder = getattr(model, "encoder", None)
    of_encoder = 0 if encoder is None else weights_size_bytes(encoder)
    num_aux = num_noted_before(speculator.aux_layers, layers_of_target(model, parallel))
    received = receive_buffer_bytes(
        parallel.pipeline, limits.max_num_tokens, config.model.hidden_size, services.dtype, num_aux
    )
    return (
        MemoryTerm("weights", weights_bytes - of_encoder, "weights"),
        MemoryTerm("encoder_weights", of_encoder, "encoder weights"),
        *step,
        MemoryTerm("receive_buffer", received, "received hidden states"),
        *memory_of_features(config, model, services.device.kind, services.dtype),
    )


def _measure_graphs(device: Device, runner: ModelRunner) -> int:
    """Return the memory of graphs: the pool that they share, the buffers between pieces, and a workspace."""
    padding = runner.padding
    if not (padding.sizes or padding.token_sizes):
        return 0
    pool = _peak(device, lambda: run_largest_graph(runner)) if padding.sizes else 0
    buffers = 0
    if padding.token_sizes:
        with device.measure_peak() as mixed:
            buffers = run_largest_mixed_graph(runner)
        pool = max(pool, mixed.bytes_above_start - buffers)
    return pool + buffers + _WORKSPACE_BYTES


def _peak(device: Device, run: Callable[[], object]) -> int:
    with device.measure_peak() as peak:
        run()
    return peak.bytes_above_start


def throwaway_kv_cache(specs: Mapping[str, KVCacheSpec], num_tokens: int) -> KVCacheConfig:
    """Return a KV cache for one step, with separate memory for every layer."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    pools: list[KVCachePool] = []
    groups = []
    for spec, names in by_spec.items():
        num_blocks = 1 + max(spec.blocks_of_one_request(num_tokens))
        groups.append(KVCacheGroupSpec(layer_names=tuple(names), spec=spec, pool=len(pools)))
        tensors = [KVCacheTensor(size_bytes=spec.page_size_bytes * num_blocks, shared_by=(name,)) for name in names]
        pools.append(KVCachePool(num_blocks=num_blocks, tensors=tuple(tensors)))
    return KVCacheConfig(pools=tuple(pools), groups=tuple(groups))


def measure_logits_processors(sampling: SamplingConfig, device: Device, limits: RunnerLimits) -> int:
    """Return the bytes of tensors that custom logits processors allocate at construction.

    Raises ConfigError when one cannot be loaded or made.
    """
    classes = [found for found in load_logits_processors(sampling.logits_processors) if found is not ThinkingBudget]
    if not classes:
        return 0
    num_slots, max_model_len = limits.max_num_reqs + 1, limits.max_model_len
    # Like the runner's table, it takes no memory before it is written to.
    token_ids = device.allocate(num_slots * max_model_len * 4).view(torch.int32).view(num_slots, max_model_len)
    context = ProcessorContext(device, num_slots, limits.vocab_size, token_ids)
    with device.measure_peak() as peak:
        CustomProcessors(context, classes)
    return peak.bytes_above_start
