"""How much memory a step takes, measured on a runner that is made for it and thrown away."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.attention import LayerAttention
from penstock.config import SamplingConfig
from penstock.contract import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor
from penstock.device import Device
from penstock.models.interface import LanguageModel
from penstock.runner.dummy_runs import (
    num_profile_blocks,
    profile_forward,
    profile_prompt_logprobs,
    profile_sampling,
)
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.worker.estimate import waiting_row_bytes
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
    """Run the heaviest steps and watch the memory.

    Where a full step would take long (the CPU), a smaller one is run and its growth over the smallest possible step
    is scaled up: both activations and logits grow linearly with tokens and rows.
    """
    num_tokens, num_rows = limits.max_num_tokens, limits.max_num_reqs
    run_tokens = min(num_tokens, device.max_profile_tokens, limits.max_model_len - 1) or 1
    config = _throwaway_kv_cache(specs, run_tokens)
    runner = ModelRunner(device, model, layers, config, limits, attention_backend=attention_backend, sampling=sampling)
    runner.kv_cache.touch()

    # What libraries take for themselves at their first call does not grow, and must not be scaled up.
    fixed = _peak(device, lambda: profile_forward(runner, min(2, run_tokens)))
    activations = _peak(device, lambda: profile_forward(runner, run_tokens)) * -(-num_tokens // run_tokens)
    # Larger batches are sampled in parts: the rows of the other parts wait.
    num_sampled_rows = min(num_rows, runner.sampler.max_rows)
    sampled = _peak_of_rows(device, lambda rows: profile_sampling(runner, rows), num_sampled_rows)
    sampled += (num_rows - num_sampled_rows) * waiting_row_bytes(limits.vocab_size, sampling)
    # A step computes its prompts' log-probabilities first, and gives that memory back before it samples.
    num_prompt_rows = min(runner.prompt_logprobs.max_rows, num_tokens)
    prompts = _peak_of_rows(device, lambda rows: profile_prompt_logprobs(runner, rows), num_prompt_rows)
    return StepMemory(activations=fixed + activations, sampling=max(sampled, prompts))


def _peak(device: Device, run: Callable[[], None]) -> int:
    with device.measure_peak() as peak:
        run()
    return peak.bytes_above_start


def _peak_of_rows(device: Device, run: Callable[[int], None], num_rows: int) -> int:
    """The peak of so many rows, from that of fewer where so many would take long.

    What libraries take for themselves at their first call does not grow with the rows, and is not scaled up.
    """
    run_rows = min(num_rows, device.max_profile_rows)
    first, again = (_peak(device, lambda: run(run_rows)) for _ in range(2))
    return max(0, first - again) + again * -(-num_rows // run_rows)


def _throwaway_kv_cache(specs: Mapping[str, KVCacheSpec], num_tokens: int) -> KVCacheConfig:
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
        groups=tuple(
            KVCacheGroupSpec(layer_names=tuple(names), spec=spec)  # type: ignore[arg-type]
            for spec, names in by_spec.items()
        ),
    )
