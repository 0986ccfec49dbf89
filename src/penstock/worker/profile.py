"""How much memory a step takes, measured on a runner that is made for it and thrown away."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.attention import LayerAttention
from penstock.config import SamplingConfig
from penstock.contract import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor
from penstock.device import Device
from penstock.models.interface import LanguageModel
from penstock.runner.dummy_runs import (
    finish_prompt,
    num_profile_blocks,
    profile_prompt_logprobs,
    profile_sampling,
    start_prompt,
)
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.worker.estimate import logits_bytes, prompt_results_bytes, waiting_row_bytes
from penstock.worker.memory_plan import StepMemory


def measure_step_memory(
    device: Device,
    model: LanguageModel,
    layers: Mapping[str, LayerAttention],
    specs: Mapping[str, KVCacheSpec],
    limits: RunnerLimits,
    attention_backend: str | None,
    sampling: SamplingConfig,
) -> StepMemory:
    """The tensors of the heaviest step.

    Where a full step would take long (the CPU), two smaller ones are run: what tensors take grows linearly with tokens.
    Sampling, which is the same for every model, is then not run at all but derived.
    """
    num_tokens, num_rows = limits.max_num_tokens, limits.max_num_reqs
    run_tokens = min(num_tokens, device.max_profile_tokens, limits.max_model_len - 1) or 1
    config = throwaway_kv_cache(specs, run_tokens)
    runner = ModelRunner(device, model, layers, config, limits, attention_backend=attention_backend, sampling=sampling)
    runner.kv_cache.touch()
    activations = _peak_of_tokens(device, runner, run_tokens, num_tokens)
    if device.max_profile_rows == 0:
        activations -= runner.kv_cache.program_bytes_spared(num_tokens)
        logits = logits_bytes(limits.vocab_size, num_tokens, num_rows, sampling, device.kind)
        return StepMemory(activations, logits)
    # Larger batches are sampled in parts: the rows of the other parts wait.
    num_sampled_rows = min(num_rows, runner.sampler.max_rows)
    sampled = _peak(device, lambda: profile_sampling(runner, num_sampled_rows))
    sampled += (num_rows - num_sampled_rows) * waiting_row_bytes(limits.vocab_size, sampling)
    num_prompt_rows = min(num_tokens, runner.prompt_logprobs.max_rows)
    prompts = _peak(device, lambda: profile_prompt_logprobs(runner, num_prompt_rows))
    prompts += prompt_results_bytes(limits.vocab_size, num_tokens, sampling)
    return StepMemory(activations, max(sampled, prompts))


def _peak_of_tokens(device: Device, runner: ModelRunner, run_tokens: int, num_tokens: int) -> int:
    """The peak of a step of `num_tokens`, from steps of at most `run_tokens`."""
    first_tokens, half_tokens = min(2, run_tokens), max(1, run_tokens // 2)
    first, full, half = (_peak_of_prompt(device, runner, size) for size in (first_tokens, run_tokens, half_tokens))
    per_token = (full - half) / (run_tokens - half_tokens) if run_tokens > half_tokens else full
    # What libraries and backends take for themselves at their first call, and keep.
    kept = max(0, first - int(full - per_token * (run_tokens - first_tokens)))
    return kept + full + int(per_token * (num_tokens - run_tokens))


def _peak_of_prompt(device: Device, runner: ModelRunner, num_tokens: int) -> int:
    """Of its forward pass; the head's product comes later, and for few rows."""
    with device.measure_peak() as peak:
        output = start_prompt(runner, [0] * num_tokens)
    finish_prompt(runner, output)
    return peak.bytes_above_start


def _peak(device: Device, run: Callable[[], None]) -> int:
    with device.measure_peak() as peak:
        run()
    return peak.bytes_above_start


def throwaway_kv_cache(specs: Mapping[str, KVCacheSpec], num_tokens: int) -> KVCacheConfig:
    """A cache that holds one step; every layer has its own memory and group, since nothing is shared for long."""
    num_blocks = max(num_profile_blocks(num_tokens, spec.block_size) for spec in specs.values())
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
