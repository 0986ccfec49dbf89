"""The memory arithmetic: what is there, what the model takes, what is left for the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import OutOfMemory
from penstock.observability.units import format_bytes

# Share of the free memory that an engine takes at most when it was not told how much.
_SHARE_OF_FREE = 0.9
_TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that a step takes at most, besides weights and persistent state."""

    activations: int
    sampling: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All in bytes.

    total: what this process could use alone. free_at_start: what was left when it began.
    fraction: share of `total` that the engine may take. process: held before the model was loaded.
    weights: parameters and buffers. activations: highest level of a step's forward pass above that.
    sampling: highest level of logits, sampling and log-probabilities. runner_state: per-slot tables.
    logits_processors: tensors that custom ones have made.
    requested_kv_cache: set by option, which then overrides what is left.
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

    @property
    def budget(self) -> int:
        return int(self.total * self.fraction)

    @property
    def left_for_kv_cache(self) -> int:
        """What the budget leaves; negative when the model alone exceeds it."""
        return self.budget - self.without_kv_cache

    @property
    def without_kv_cache(self) -> int:
        """What the engine takes besides its KV cache."""
        step = self.activations + self.sampling
        return self.process + self.weights + step + self.runner_state + self.logits_processors

    @property
    def kv_cache_bytes(self) -> int:
        return self.left_for_kv_cache if self.requested_kv_cache is None else self.requested_kv_cache

    def table(self) -> str:
        """The arithmetic, a line per term."""
        rows = [
            ("memory that this process may use", self.total),
            ("free when it started", self.free_at_start),
            (f"budget (memory_fraction {self.fraction:g})", self.budget),
            ("- held before loading", self.process),
            ("- weights", self.weights),
            ("- activations", self.activations),
            ("- logits and sampling", self.sampling),
            ("- request state", self.runner_state),
            *([("- custom logits processors", self.logits_processors)] if self.logits_processors else []),
            ("= left for the KV cache", self.left_for_kv_cache),
        ]
        if self.requested_kv_cache is not None:
            rows.append(("KV cache, as set by kv_cache_memory_bytes", self.requested_kv_cache))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {format_bytes(size):>10}" for name, size in rows)


def choose_memory_fraction(requested: float | None, default: float, *, free: int, total: int) -> float:
    """What was asked for, or the device's default where so much is free."""
    return min(default, _SHARE_OF_FREE * free / total) if requested is None else requested


def runner_state_bytes(max_num_seqs: int, max_model_len: int, vocab_size: int) -> int:
    """Every slot's tokens, and how often it has said each token of the vocabulary, for penalties.

    Whatever else is kept per slot is small beside these.
    """
    return max_num_seqs * (max_model_len + vocab_size) * _TOKEN_ID_BYTES


def check_plan(plan: MemoryPlan) -> None:
    """Raise OutOfMemory, with the table and what to change, when the plan does not work out."""
    if plan.budget > plan.free_at_start + plan.process:
        raise OutOfMemory(
            f"memory_fraction={plan.fraction:g} asks for {format_bytes(plan.budget)}, but only "
            f"{format_bytes(plan.free_at_start)} are free. Lower --memory-fraction to "
            f"{math.floor(100 * plan.free_at_start / plan.total) / 100:g} or free memory.\n{plan.table()}"
        )
    if plan.requested_kv_cache is None and plan.left_for_kv_cache <= 0:
        raise OutOfMemory(
            "The model leaves no memory for the KV cache. Raise --memory-fraction, lower --max-num-batched-tokens or "
            f"--max-num-seqs, or take a smaller model.\n{plan.table()}"
        )
    if plan.requested_kv_cache is not None and plan.requested_kv_cache > plan.free_at_start - plan.weights:
        raise OutOfMemory(
            f"kv_cache_memory_bytes={plan.requested_kv_cache} is more than what is free beside the weights. "
            f"Lower it.\n{plan.table()}"
        )
