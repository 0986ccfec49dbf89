"""Memory plan: available memory, the model's needs, and the rest for the KV cache. Needs no torch."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

from penstock.config import EngineConfig
from penstock.device.limits import DEFAULT_MEMORY_FRACTION
from penstock.errors import OutOfMemory
from penstock.observability.units import format_bytes
from penstock.worker.capabilities import allows_options

logger = logging.getLogger(__name__)

# Memory of a process with torch and all other imports, before it loads a model.
PROCESS_BYTES = {"cpu": 230 << 20, "cuda": 0}
# Least memory of libraries from their first matrix product on: code, tables and buffers. torch counts the workspace of
# cuBLAS as tensors.
LIBRARY_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}
# Maximum of freed memory that glibc's malloc keeps, as measured: three of its largest heap chunks, 32 MiB each. It
# trims the heap only once twice as much is free at its end, and the gap of an aligned tensor is too small for the next
# one of its size.
_MAX_HELD_BACK_BYTES = {"cpu": 96 << 20, "cuda": 0}
# Size of an int8 matrix with its scales, as a share of bfloat16; of float32 the share is less.
_INT8_SHARE = 0.52
_FLOAT_BYTES = 2
# Default limit of an engine, as a share of the memory that is free or its own already.
_SHARE_OF_FREE = 0.9


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Maximum memory of a step in bytes, besides weights.

    runner_state: buffers kept between steps. graphs: memory pool of the CUDA graphs, and buffers between their pieces.
    """

    activations: int
    sampling: int
    runner_state: int
    graphs: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one rank, in bytes.

    total: memory that this process could use alone. free_at_start: free memory when it started.
    fraction: share of `total` for the engine, or with `is_default_fraction` the limit of its KV cache alone.
    process: memory in use before the model was loaded.
    weights: parameters and buffers. activations: peak of a step's forward pass.
    sampling: peak of logits, sampling and log-probabilities. runner_state: per-slot tables. graphs: memory pool of the
    CUDA graphs, and buffers between their pieces.
    logits_processors: tensors of custom logits processors.
    receive_buffer: hidden states received from the previous pipeline stage. adapters: LoRA adapters on the device.
    requested_kv_cache: kv_cache_memory_bytes, which overrides the remaining memory.
    """

    total: int
    free_at_start: int
    fraction: float
    process: int
    weights: int
    activations: int
    sampling: int
    runner_state: int
    requested_kv_cache: int | None = None
    logits_processors: int = 0
    receive_buffer: int = 0
    adapters: int = 0
    graphs: int = 0
    is_default_fraction: bool = False

    @property
    def budget(self) -> int:
        """Memory limit of the engine."""
        if self.is_default_fraction:
            return int(_SHARE_OF_FREE * (self.free_at_start + self.process))
        return int(self.total * self.fraction)

    @property
    def left_for_kv_cache(self) -> int:
        """Budget minus all other terms; negative when the model alone exceeds it."""
        return self.budget - self.without_kv_cache

    @property
    def most_for_kv_cache(self) -> int:
        """Limit of the KV cache."""
        return int(self.total * self.fraction)

    @property
    def without_kv_cache(self) -> int:
        """Memory of the engine without its KV cache."""
        step = self.activations + self.sampling + self.graphs
        more = self.runner_state + self.logits_processors + self.receive_buffer + self.adapters
        return self.process + self.weights + step + more

    @property
    def kv_cache_bytes(self) -> int:
        if self.requested_kv_cache is not None:
            return self.requested_kv_cache
        return min(self.left_for_kv_cache, self.most_for_kv_cache)

    def table(self) -> str:
        """Format the plan, one line per term."""
        budget = (
            f"{_SHARE_OF_FREE:g} of free and held" if self.is_default_fraction else f"memory_fraction {self.fraction:g}"
        )
        rows = [
            ("memory that this process may use", self.total),
            ("free when it started", self.free_at_start),
            (f"budget ({budget})", self.budget),
            ("- held before loading", self.process),
            ("- weights", self.weights),
            ("- activations", self.activations),
            ("- logits and sampling", self.sampling),
            ("- request state", self.runner_state),
            *([("- CUDA graphs", self.graphs)] if self.graphs else []),
            *([("- custom logits processors", self.logits_processors)] if self.logits_processors else []),
            *([("- received hidden states", self.receive_buffer)] if self.receive_buffer else []),
            *([("- LoRA adapters", self.adapters)] if self.adapters else []),
            ("= left for the KV cache", self.left_for_kv_cache),
        ]
        if self.requested_kv_cache is not None:
            rows.append(("KV cache, as set by kv_cache_memory_bytes", self.requested_kv_cache))
        elif self.is_default_fraction:
            rows.append((f"KV cache at most ({self.fraction:g} of memory)", self.most_for_kv_cache))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {format_bytes(size):>10}" for name, size in rows)


def affordable_fraction(asked: float | None, device: str, *, total: int, available: int) -> tuple[float, bool]:
    """Return the plan's `fraction`, and whether it is the default.

    asked: memory_fraction. available: bytes that are free, or the engine's already. A CPU shares its memory with other
    processes, so a share that is not free falls back to the default with a warning. On a GPU it stays, for
    `check_plan` to refuse.
    """
    default = DEFAULT_MEMORY_FRACTION[device]
    if asked is None:
        return default, True
    if device == "cpu" and asked * total > available:
        logger.warning(
            "memory_fraction=%g asks for %s, but only %s are free: this engine takes %g of those at most.",
            asked,
            format_bytes(int(asked * total)),
            format_bytes(available),
            _SHARE_OF_FREE,
        )
        return default, True
    return asked, False


def check_plan(plan: MemoryPlan, saved_by_int8: int = 0) -> None:
    """Raise OutOfMemory, with the table and remedies, when the plan does not fit.

    saved_by_int8: bytes that int8 weights would save; 0 if they are not possible.
    """
    if not plan.is_default_fraction and plan.budget > plan.free_at_start + plan.process:
        fits = math.floor(100 * plan.free_at_start / plan.total) / 100
        raise OutOfMemory(
            f"memory_fraction={plan.fraction:g} asks for {format_bytes(plan.budget)}, but only "
            f"{format_bytes(plan.free_at_start)} are free. Lower it to {fits:g}, leave it out, or free "
            f"memory.\n{plan.table()}"
        )
    if plan.requested_kv_cache is None and plan.left_for_kv_cache <= 0:
        more = "Free memory" if plan.is_default_fraction else "Raise memory_fraction or leave it out"
        lighter = "quantization='int8', or take " if plan.left_for_kv_cache + saved_by_int8 > 0 else ""
        raise OutOfMemory(
            f"The model leaves no memory for the KV cache. {more}, lower max_num_batched_tokens or "
            f"max_num_seqs, or take {lighter}a smaller model.\n{plan.table()}"
        )
    if plan.requested_kv_cache is not None and plan.requested_kv_cache > plan.free_at_start - plan.weights:
        raise OutOfMemory(
            f"kv_cache_memory_bytes={plan.requested_kv_cache} is more than what is free beside the weights. "
            f"Lower it.\n{plan.table()}"
        )


def resident_step(tensors: StepMemory, kind: str, split_contexts: int = 0, library_bytes: int = 0) -> StepMemory:
    """Return the system memory of a step from its tensors.

    split_contexts: buffers of split-KV attention. library_bytes: memory of libraries, where it was measured.
    """
    most_held_back = _MAX_HELD_BACK_BYTES[kind]
    return StepMemory(
        activations=tensors.activations
        + min(tensors.activations, most_held_back)
        + split_contexts
        + max(library_bytes, LIBRARY_BYTES[kind]),
        sampling=tensors.sampling + min(tensors.sampling, most_held_back),
        runner_state=tensors.runner_state,
        graphs=tensors.graphs,
    )


def saved_by_int8_weights(config: EngineConfig, weights: int) -> int:
    """Return the bytes that `quantization="int8"` saves at least of a worker's weights; 0 if it is not possible.

    Embedding and output projection count as unquantised.
    """
    model = config.model
    if model.quantization is not None or "quantization_config" in model.hf_config:
        return 0
    if not allows_options(replace(config, model=replace(model, quantization="int8"))):
        return 0
    kept = 2 * model.vocab_size * model.hidden_size * _FLOAT_BYTES
    return int((1 - _INT8_SHARE) * max(0, weights - kept))
