"""Memory plan: available memory, the model's needs, and the rest for the KV cache. Needs no torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

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
class MemoryTerm:
    """Part of a rank's memory beside its KV cache.

    name: of the term in data. why: what takes it, as a line of the table. is_temporary: whether steps allocate and free
    it, so that the C library may hold back as much again. is_mapped: whether it is the content of a file, whose pages
    the system drops as it needs memory.
    """

    name: str
    size_bytes: int
    why: str
    is_temporary: bool = False
    is_mapped: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one rank, in bytes. `plan[name]` is the size of a term, 0 if the plan has no such term.

    total: memory that this process could use alone. free_at_start: free memory when it started.
    fraction: share of `total` for the engine, or with `is_default_fraction` the limit of its KV cache alone.
    terms: all memory beside the KV cache, among it "process", in use before the model was loaded, "weights", and
        "encoder_weights", of which decodes read none.
    requested_kv_cache: kv_cache_memory_bytes, which overrides the remaining memory.
    usual_fraction: share of `total` beyond which the KV cache grows only as far as one request needs it.
    """

    total: int
    free_at_start: int
    fraction: float
    terms: tuple[MemoryTerm, ...]
    requested_kv_cache: int | None = None
    is_default_fraction: bool = False
    usual_fraction: float = 1.0

    def __getitem__(self, name: str) -> int:
        return bytes_of(self.terms, name)

    def with_term(self, name: str, size_bytes: int) -> MemoryPlan:
        """Return the plan with another size of a term."""
        return replace(self, terms=with_size(self.terms, name, size_bytes))

    @property
    def budget(self) -> int:
        """Memory limit of the engine."""
        if self.is_default_fraction:
            return int(_SHARE_OF_FREE * self.free_or_held)
        return int(self.total * self.fraction)

    @property
    def free_or_held(self) -> int:
        """Memory that was free at the start, or in use by this process."""
        return self.free_at_start + self["process"]

    @property
    def free_beside_weights(self) -> int:
        """Memory that was free at the start and that weights do not take."""
        return self.free_at_start - self["weights"] - self["encoder_weights"]

    @property
    def left_for_kv_cache(self) -> int:
        """Budget minus all terms; negative when the model alone exceeds it."""
        return self.budget - self.without_kv_cache

    @property
    def most_for_kv_cache(self) -> int:
        """Limit of the KV cache."""
        return int(self.total * self.fraction)

    @property
    def without_kv_cache(self) -> int:
        """Memory of the engine without its KV cache, and without what stays in a file."""
        return sum(term.size_bytes for term in self.terms if not term.is_mapped)

    @property
    def kv_cache_bytes(self) -> int:
        if self.requested_kv_cache is not None:
            return self.requested_kv_cache
        return min(self.left_for_kv_cache, self.most_for_kv_cache)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; sizes in bytes, those of the terms by their names."""
        data = {name: value for name, value in asdict(self).items() if name != "terms"}
        terms = {term.name: term.size_bytes for term in self.terms}
        return {**data, **terms, "budget": self.budget, "left_for_kv_cache": self.left_for_kv_cache}

    def table(self) -> str:
        """Format the plan, one line per term that takes memory."""
        budget = (
            f"{_SHARE_OF_FREE:g} of free and held" if self.is_default_fraction else f"memory_fraction {self.fraction:g}"
        )
        rows = [
            ("memory that this process may use", self.total),
            ("free when it started", self.free_at_start),
            (f"budget ({budget})", self.budget),
            *(
                (term.why if term.is_mapped else f"- {term.why}", term.size_bytes)
                for term in self.terms
                if term.size_bytes
            ),
            ("= left for the KV cache", self.left_for_kv_cache),
        ]
        if self.requested_kv_cache is not None:
            rows.append(("KV cache, as set by kv_cache_memory_bytes", self.requested_kv_cache))
        elif self.is_default_fraction:
            usual = min(self.usual_fraction, self.fraction)
            rows.append((f"default bound ({usual:g} of memory)", int(self.total * usual)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {format_bytes(size):>10}" for name, size in rows)


def bytes_of(terms: Iterable[MemoryTerm], name: str) -> int:
    """Return the size of a term; 0 without it."""
    return sum(term.size_bytes for term in terms if term.name == name)


def with_size(terms: Iterable[MemoryTerm], name: str, size_bytes: int) -> tuple[MemoryTerm, ...]:
    """Return terms with another size of one of them."""
    return tuple(replace(term, size_bytes=size_bytes) if term.name == name else term for term in terms)


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


def most_for_weights(memory_fraction: float | None, total: int, free: int, held: int) -> int:
    """Bytes beyond which weights exceed the memory of an engine. free: at its start. held: by its process then."""
    most = int(_SHARE_OF_FREE * free)
    return most if memory_fraction is None else min(most, int(memory_fraction * total) - held)


def offloaded_bytes(asked: int, weights: int, most: int) -> int:
    """Bytes of weights that stay in a file: those asked for, else all that exceeds half of the memory, if they do not
    fit; the other half is for the KV cache, and for pages of the file.

    most: `most_for_weights`.
    """
    if asked:
        return min(asked, weights)
    return weights - max(0, most) // 2 if weights > most else 0


def split_offloaded(terms: Iterable[MemoryTerm], offloaded: int) -> tuple[MemoryTerm, ...]:
    """Return terms in which so many bytes of the weights stay in a file."""
    terms = tuple(terms)
    if not offloaded:
        return terms
    weights, encoder = bytes_of(terms, "weights"), bytes_of(terms, "encoder_weights")
    mapped = MemoryTerm("mapped_weights", offloaded, "(weights that stay in a file)", is_mapped=True)
    terms = with_size(terms, "weights", max(0, weights - offloaded))
    return (*with_size(terms, "encoder_weights", min(encoder, weights + encoder - offloaded)), mapped)


def check_plan(plan: MemoryPlan, saved_by_int8: int = 0) -> None:
    """Raise OutOfMemory, with the table and remedies, when the plan does not fit.

    saved_by_int8: bytes that int8 weights would save; 0 if they are not possible.
    """
    if not plan.is_default_fraction and plan.budget > plan.free_or_held:
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
    if plan.requested_kv_cache is not None and plan.requested_kv_cache > plan.free_beside_weights:
        raise OutOfMemory(
            f"kv_cache_memory_bytes={plan.requested_kv_cache} is more than what is free beside the weights. "
            f"Lower it.\n{plan.table()}"
        )


def resident_terms(
    tensors: Iterable[MemoryTerm], kind: str, split_contexts: int = 0, library_bytes: int = 0
) -> list[MemoryTerm]:
    """Return the system memory of terms from their tensors. kind: of the device.

    split_contexts: buffers of split-KV attention. library_bytes: memory of libraries, where it was measured.
    """
    activations = split_contexts + max(library_bytes, LIBRARY_BYTES[kind])
    terms = []
    for term in tensors:
        held_back = min(term.size_bytes, _MAX_HELD_BACK_BYTES[kind]) if term.is_temporary else 0
        beside = activations if term.name == "activations" else 0
        terms.append(replace(term, size_bytes=term.size_bytes + held_back + beside))
    return terms


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
