"""Weights that a caller gives in place of a checkpoint's files, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.layers.weights import WeightSlot
from penstock.models.causal_lm import CausalLM

# Values by which a tied weight that is sent twice is compared.
_SAMPLE = 1 << 16


class WeightSource:
    """Tensors by their names in a checkpoint, or in a sharded state.

    like: live model, whose ties the weights must have. keeps: whether tensors stay valid after the next one is asked
    for.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], like: CausalLM, *, keeps: bool = False) -> None:
        self.like = like
        self._tensors, self._keeps = tensors, keeps
        # None until the loader has said which tensors the model needs.
        self._missing: dict[str, None] | None = None
        self.taken: list[str] = []
        self._samples: dict[str, Tensor] = {}

    @property
    def missing(self) -> list[str] | None:
        """Names of the tensors that have not come yet; None before the first one is asked for."""
        return None if self._missing is None else list(self._missing)

    def pieces(self, model: CausalLM, *, is_state: bool) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors by the model's own names, of stacked ones piece by piece.

        Of tied weights the first one that comes is taken. Raises CheckpointError if the other has other values.
        """
        if is_state:
            yield from self._tensors
            return
        ties = model.tied_weights()
        for stored_name, stored in self._tensors:
            for name, tensor in model.pieces(stored_name, stored):
                own_name = ties.get(name, name)
                if own_name not in ties.values() or self._is_first(own_name, name, tensor):
                    yield own_name, tensor

    def noted(
        self, tensors: Iterable[tuple[str, Tensor]], slots: Mapping[str, WeightSlot]
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors on their way to these slots, and note which ones have come."""
        self._missing = dict.fromkeys(slots)
        for name, tensor in tensors:
            yield name, tensor
            if self._missing.pop(name, name) is None:
                self.taken.append(name)

    def kept(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Iterate over tensors that stay valid: those of a quantised checkpoint wait for others of their layer."""
        return ((name, tensor if self._keeps else tensor.clone()) for name, tensor in tensors)

    def wants(self, stored_name: str, stored: Tensor) -> bool:
        """Whether a tensor changes the weights of a model that has had all of these: not if no slot takes it, or if
        it is a tied one with the values that came before.
        """
        if self.like.joins(stored_name):
            return True
        ties = self.like.tied_weights()
        for name, tensor in self.like.pieces(stored_name, stored):
            own_name = ties.get(name, name)
            known = self._samples.get(own_name)
            if own_name in self.taken and (
                known is None or name not in ties or not torch.equal(known, _sample(tensor))
            ):
                return True
        return False

    def _is_first(self, own_name: str, name: str, tensor: Tensor) -> bool:
        sample = _sample(tensor)
        known = self._samples.setdefault(own_name, sample)
        if known is not sample and not torch.equal(known, sample):
            raise CheckpointError(
                f"{name} is tied to {own_name} in this engine, but has other values. Send equal ones, or create a new "
                "engine with tie_word_embeddings=False (hf_overrides)."
            )
        return known is sample


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE)].float().clone().cpu()
