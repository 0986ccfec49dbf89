"""Measured memory: of steps, on a temporary runner, and of custom logits processors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.attention import CacheLayer
from penstock.config import GraphConfig, SamplingConfig
from penstock.contract import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor
from penstock.device import Device
from penstock.models.interface import LanguageModel
from penstock.runner.dummy_runs import (
    num_profile_blocks,
    profile_prompt_logprobs,
    profile_sampling,
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
from penstock.runner.slot_owner import SlotOwner
from penstock.runner.speculative import NO_SPECULATOR, Speculator
from penstock.worker.memory_plan import StepMemory

# Of cuBLAS for the stream that graphs are captured on, on Hopper.
_WORKSPACE_BYTES = 32 << 20


def measure_step_memory(
    device: Device,
    model: LanguageModel,
    layers: Mapping[str, CacheLayer],
    specs: Mapping[str, KVCacheSpec],
    limits: RunnerLimits,
    attention_backend: str | None,
    sampling: SamplingConfig,
    *,
    fast_paths: bool = True,
    graphs: GraphConfig | None = None,
    speculator: Speculator = NO_SPECULATOR,
    make_owners: Callable[[], Sequence[SlotOwner]] = list,
) -> StepMemory:
    """Measure the tensors of the largest steps, and the buffers of the runner.

    make_owners: makes the slot owners of features. Without custom logits processors, which are a term of their own.
    """
    with torch.no_grad():
        num_tokens = limits.max_num_tokens + speculator.most_extra_tokens(limits.max_num_reqs)
        config = throwaway_kv_cache(specs, num_tokens)
        with device.measure_peak() as made:
            runner = ModelRunner(
                device,
                model,
                layers,
                config,
                limits,
                attention_backend=attention_backend,
                sampling=sampling,
                logits_processors=(),
                fast_paths=fast_paths,
                graphs=graphs,
                speculator=speculator,
                owners=make_owners(),
            )
            # Includes tables that are allocated on first use.
            profile_sampling(runner, num_reqs=1)
        with device.measure_peak() as forward:
            hidden_TD = run_longest_prompt(runner, limits.max_num_tokens)
        drafted = hidden_TD.nbytes + _peak(device, lambda: run_longest_prompt_of_drafter(runner, limits.max_num_tokens))
        sampled = _peak(device, lambda: profile_sampling(runner, limits.max_num_reqs))
        prompts = _peak(device, lambda: profile_prompt_logprobs(runner, hidden_TD))
        captured = _measure_graphs(device, runner)
    return StepMemory(
        max(forward.bytes_above_start, drafted), max(sampled, prompts), made.bytes_kept - config.size_bytes, captured
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
    num_blocks = max((num_profile_blocks(num_tokens, spec.block_size) for spec in specs.values()), default=1)
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    return KVCacheConfig(
        num_blocks=num_blocks,
        tensors=tuple(
            KVCacheTensor(size_bytes=spec.page_size_bytes * num_blocks, shared_by=(name,))
            for name, spec in specs.items()
        ),
        groups=tuple(KVCacheGroupSpec(layer_names=tuple(names), spec=spec) for spec, names in by_spec.items()),
    )


def measure_logits_processors(
    sampling: SamplingConfig, device: Device, *, max_num_reqs: int, max_model_len: int, vocab_size: int
) -> int:
    """Return the bytes of tensors that custom logits processors allocate at construction.

    Raises ConfigError when one cannot be loaded or made.
    """
    classes = [found for found in load_logits_processors(sampling.logits_processors) if found is not ThinkingBudget]
    if not classes:
        return 0
    num_slots = max_num_reqs + 1
    # Like the runner's table, it takes no memory before it is written to.
    token_ids = device.allocate(num_slots * max_model_len * 4).view(torch.int32).view(num_slots, max_model_len)
    context = ProcessorContext(device, num_slots, vocab_size, token_ids)
    with device.measure_peak() as peak:
        CustomProcessors(context, classes)
    return peak.bytes_above_start
