"""What a process takes from the system beside and around its tensors: measured once, and the same for every model."""

from __future__ import annotations

from penstock.worker.memory_plan import StepMemory

# Of a process that has imported torch and what else an engine needs, before it loads a model.
PROCESS_BYTES = {"cpu": 230 << 20, "cuda": 0}
# What the CPU's libraries take at their first product: code, tables and buffers. cuBLAS's workspace torch allocates as
# it does tensors.
LIBRARY_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}
# What the C library holds back of the memory that tensors give back, at most, as measured: three places of the largest
# size, 32 MiB, that glibc's malloc does not ask the system for by itself. It ends its heap earlier only once twice as
# much is free at its end, and a place that an aligned tensor left is too small for the next one of its size.
_MAX_HELD_BACK_BYTES = {"cpu": 96 << 20, "cuda": 0}


def resident_step(tensors: StepMemory, kind: str, split_contexts: int = 0) -> StepMemory:
    """The memory that a step takes from the system. split_contexts: what attention keeps of them, in no tensor."""
    most_held_back = _MAX_HELD_BACK_BYTES[kind]
    return StepMemory(
        activations=tensors.activations
        + min(tensors.activations, most_held_back)
        + split_contexts
        + LIBRARY_BYTES[kind],
        sampling=tensors.sampling + min(tensors.sampling, most_held_back),
        runner_state=tensors.runner_state,
    )
