"""The memory arithmetic: what is there, what the model takes, what is left for the KV cache."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from penstock.device.limits import DEFAULT_MEMORY_FRACTION
from penstock.errors import OutOfMemory
from penstock.observability.units import format_bytes

logger = logging.getLogger(__name__)

# Share of the memory that is free, or its own already, that an engine takes at most when it was not told how much.
_SHARE_OF_FREE = 0.9


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that a step takes at most, besides weights. runner_state: what the runner keeps from one to the next."""

    activations: int
    sampling: int
    runner_state: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All in bytes.

    total: what this process could use alone. free_at_start: what was left when it began.
    fraction: share of `total` that the engine may take, or its KV cache, if this is the default and nobody's choice.
    process: held before the model was loaded.
    weights: parameters and buffers. activations: highest level of a step's forward pass above that.
    sampling: highest level of logits, sampling and log-probabilities. runner_state: per-slot tables.
    logits_processors: tensors that custom ones have made.
    receive_buffer: where a stage of a pipeline gets the hidden states of the one before it, if there is one.
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
    receive_buffer: int = 0
    is_default_fraction: bool = False

    @property
    def budget(self) -> int:
        """What the engine may take in all."""
        if self.is_default_fraction:
            return int(_SHARE_OF_FREE * (self.free_at_start + self.process))
        return int(self.total * self.fraction)

    @property
    def left_for_kv_cache(self) -> int:
        """What the budget leaves; negative when the model alone exceeds it."""
        return self.budget - self.without_kv_cache

    @property
    def most_for_kv_cache(self) -> int:
        """What the KV cache may take, however much is left."""
        return int(self.total * self.fraction)

    @property
    def without_kv_cache(self) -> int:
        """What the engine takes besides its KV cache."""
        step = self.activations + self.sampling
        return self.process + self.weights + step + self.runner_state + self.logits_processors + self.receive_buffer

    @property
    def kv_cache_bytes(self) -> int:
        if self.requested_kv_cache is not None:
            return self.requested_kv_cache
        return min(self.left_for_kv_cache, self.most_for_kv_cache)

    def table(self) -> str:
        """The arithmetic, a line per term."""
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
            *([("- custom logits processors", self.logits_processors)] if self.logits_processors else []),
            *([("- received hidden states", self.receive_buffer)] if self.receive_buffer else []),
            ("= left for the KV cache", self.left_for_kv_cache),
        ]
        if self.requested_kv_cache is not None:
            rows.append(("KV cache, as set by kv_cache_memory_bytes", self.requested_kv_cache))
        elif self.is_default_fraction:
            rows.append((f"KV cache at most ({self.fraction:g} of memory)", self.most_for_kv_cache))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {format_bytes(size):>10}" for name, size in rows)


def affordable_fraction(asked: float | None, device: str, *, total: int, available: int) -> tuple[float, bool]:
    """The plan's `fraction`, and whether it is the default.

    asked: memory_fraction. available: bytes that are free, or the engine's already. The memory of a CPU is shared with
    whatever else runs on the machine, so there a share that is not free is a warning, and the default. On a GPU it
    stays, for `check_plan` to refuse.
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
    """Raise OutOfMemory, with the table and what to change, when the plan does not work out.

    saved_by_int8: bytes by which int8 weights would be smaller; 0 where they are not possible.
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
