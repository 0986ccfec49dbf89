"""Choices of kernels by a GPU's compute capability, as one table."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Without a GPU, plans and Triton's interpreter take an H100's choices.
_WITHOUT_GPU = (9, 0)


@dataclass(frozen=True, slots=True)
class GpuChoices:
    """Kernels that GPUs of one compute capability take.

    gpus: examples. has_bfloat16: products in bfloat16. has_float8: conversions of FP8, for an FP8 KV cache and weights
    that stay in FP8. scales_rows: cuBLASLt's FP8 products scale rows and outputs themselves. shared_kib: shared memory
    of a program, which bounds the stages of prefill attention. Other tilings keep to 99 KiB.
    """

    gpus: str
    has_bfloat16: bool
    has_float8: bool
    scales_rows: bool
    shared_kib: int


# By compute capability. One of no row takes the row before.
CHOICES: Mapping[tuple[int, int], GpuChoices] = {
    (7, 0): GpuChoices("V100, T4", has_bfloat16=False, has_float8=False, scales_rows=False, shared_kib=64),
    (8, 0): GpuChoices("A100", has_bfloat16=True, has_float8=False, scales_rows=False, shared_kib=163),
    (8, 6): GpuChoices("A10, RTX 3090", has_bfloat16=True, has_float8=False, scales_rows=False, shared_kib=99),
    (8, 9): GpuChoices("L4, L40S, RTX 4090", has_bfloat16=True, has_float8=True, scales_rows=False, shared_kib=99),
    (9, 0): GpuChoices("H100, H200", has_bfloat16=True, has_float8=True, scales_rows=True, shared_kib=227),
    (12, 0): GpuChoices("RTX 5090", has_bfloat16=True, has_float8=True, scales_rows=False, shared_kib=99),
}


def choices_of(capability: tuple[int, int]) -> GpuChoices:
    """Return the row of a compute capability: the last one that is not newer, or the first."""
    known = [at_least for at_least in CHOICES if at_least <= capability]
    return CHOICES[max(known, default=min(CHOICES))]


@functools.cache
def gpu_capability() -> tuple[int, int]:
    """Compute capability of the GPU; that of an H100 without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else _WITHOUT_GPU
