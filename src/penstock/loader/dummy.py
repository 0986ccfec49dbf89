"""Random weights, for benchmarks without a checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from penstock.layers.weights import WeightSlot

_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.02


def iterate_dummy_weights(slots: Mapping[str, WeightSlot], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Iterate over random float32 tensors, one per slot.

    Seeded by name, so independent of order. A GPU draws its own, other numbers: the CPU would take minutes. The scale
    keeps hidden states near one, so that logits are finite and differ among tokens.
    """
    if device.type != "cuda":
        device = torch.device("cpu")
    for name, slot in slots.items():
        yield name, _random_weight(name, slot.shape, device)


def _random_weight(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    generator = torch.Generator(device=device).manual_seed(seed)
    weight = torch.empty(shape, dtype=torch.float32, device=device)
    if len(shape) > 1:
        spread = math.sqrt(3 / shape[-1])
        return weight.uniform_(-spread, spread, generator=generator)
    if name.endswith(".bias"):
        return weight.uniform_(-_BIAS_SPREAD, _BIAS_SPREAD, generator=generator)
    return weight.uniform_(1 - _NORM_SPREAD, 1 + _NORM_SPREAD, generator=generator)
