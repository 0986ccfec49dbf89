"""Tokens per expert and layer, counted by the mixtures of a rank's model."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from penstock.errors import UnsupportedFeature
from penstock.layers.experts import MoE
from penstock.parallel import ParallelState


class ExpertLoad:
    """Tokens of each expert that a rank's model computed, by layer.

    Padding, and so every token of a dummy step, does not count. Ranks of a tensor-parallel group route all tokens
    alike, so only the first one counts. Raises UnsupportedFeature if no stage of the model has native experts.
    """

    def __init__(self, model: nn.Module, parallel: ParallelState, device: torch.device) -> None:
        mixtures = _mixtures(model)
        if not any(parallel.pipeline.gather_values(len(mixtures))):
            raise UnsupportedFeature(
                f"expert_stats: {type(model).__name__} has no layers with experts that count their tokens. Allowed: "
                "the mixtures of experts among the native families (docs/models.md), not through Transformers."
            )
        self._load: dict[int, Tensor] = {}
        if parallel.tensor.rank == 0:
            self._load = {
                layer: torch.zeros(len(moe.experts), dtype=torch.int64, device=device)
                for layer, moe in mixtures.items()
            }
        self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Count in this model from now on; the caller forgets programs that were recorded before."""
        for layer, moe in _mixtures(model).items():
            moe.load_E = self._load.get(layer)

    def read(self) -> dict[int, list[int]]:
        """Tokens of each expert by layer; of this stage's layers, and without any on all but one of equal ranks."""
        return {layer: load_E.tolist() for layer, load_E in self._load.items()}


def _mixtures(model: nn.Module) -> dict[int, MoE]:
    """Mixtures by the number of their layer."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            (number,) = re.findall(r"\b\d+\b", name)
            found[int(number)] = module
    return found
