"""Low-rank matrices of one module.

Suffixes: R rank, I input features, O output features, V vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def check_rank(name: str, module: str, rank: int, max_rank: int) -> None:
    """Raise CheckpointError for a rank above the engine's limit."""
    if rank > max_rank:
        raise CheckpointError(
            f"The adapter {name!r} has rank {rank} for {module}, but this engine was started for {max_rank}. Start it "
            f"with max_lora_rank={rank}."
        )
