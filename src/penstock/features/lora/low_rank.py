"""Low-rank matrices of one module.

Suffixes: R rank, I input features, O output features, V vocabulary, D hidden size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class LowRank:
    """Matrices of a module: scaling * b @ a is added to its weight.

    a: [R, I], or [R, V] of an embedding. b: [O, R], or [D, R]. base: the module's own weight, which PEFT saves with
    adapters of embeddings and LM heads; None if it is not there.
    """

    a: Tensor
    b: Tensor
    scaling: float
    is_embedding: bool
    base: Tensor | None = None


def digest_of(matrices: Mapping[str, LowRank], kept_as: str) -> str:
    """SHA-256 of all of an adapter's matrices, by the names of their modules, as 64 hexadecimal digits.

    kept_as: describes the tables in which they are kept. Equal digests mean equal results, wherever the matrices were
    read from.
    """
    digest = hashlib.sha256(kept_as.encode())
    for name, one in sorted(matrices.items()):
        tensors = [tensor for tensor in (one.a, one.b, one.base) if tensor is not None]
        shapes = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
        digest.update(repr((name, one.is_embedding, struct.pack("<d", one.scaling), shapes)).encode())
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_rank(name: str, module: str, rank: int, max_rank: int) -> None:
    """Raise CheckpointError for a rank above the engine's limit."""
    if rank > max_rank:
        raise CheckpointError(
            f"The adapter {name!r} has rank {rank} for {module}, but this engine was started for {max_rank}. Start it "
            f"with max_lora_rank={rank}."
        )
