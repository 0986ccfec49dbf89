"""Tied weights of a checkpoint, which override `config.json`.

As in Transformers: an output projection stored beside its embedding with other values is not tied, and if the
projection alone is stored, the embedding is tied to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.config import ModelConfig
from penstock.loader.sharded_state import state_slots
from penstock.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredTies:
    """Ties of a checkpoint.

    separate: names of weights that `config.json` ties and the checkpoint stores with different values. renamed: slot of
    a stored weight by its name, if the weight that it is tied to is not stored.
    """

    separate: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    def apply(self, model: CausalLM, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename the checkpoint's tensors to the model's slots, stacked ones in pieces."""
        for stored_name, stored in tensors:
            for name, tensor in model.pieces(stored_name, stored):
                yield self.renamed.get(name, name), tensor


def find_ties(model: CausalLM, tensors: Iterable[tuple[str, Tensor]]) -> StoredTies:
    """Find the tied weights of a checkpoint.

    Meta tensors count as different. A quantised projection differs from its embedding.
    """
    pairs = model.tied_weights()
    modules = {name.rpartition(".")[0]: name for name in pairs}
    sources = set(pairs.values())
    stored: dict[str, Tensor] = {}
    quantized: set[str] = set()
    for stored_name, tensor in tensors:
        name = model.checkpoint_name(stored_name)
        module = name.rpartition(".")[0]
        if name in pairs or name in sources:
            stored[name] = tensor
        elif module in modules and not name.endswith(".bias"):
            quantized.add(modules[module])
    separate, renamed = [], {}
    for name, source in pairs.items():
        if name in quantized or (name in stored and source in stored and not _are_equal(stored[name], stored[source])):
            separate.append(name)
        elif name in stored and source not in stored:
            renamed[name] = source
    return StoredTies(tuple(separate), renamed)


def find_ties_of_state(model: CausalLM, tensors: Iterable[tuple[str, Tensor]]) -> StoredTies:
    """Find the tied weights of a sharded state, which stores shared weights once."""
    shared = set(model.state_dict(keep_vars=True)) - set(state_slots(model))
    return StoredTies(tuple(name for name, _ in tensors if name in shared))


def untied(model_config: ModelConfig) -> ModelConfig:
    """Return the configuration with an untied output projection."""
    return replace(model_config, hf_config={**model_config.hf_config, "tie_word_embeddings": False})


def log_ties(ties: StoredTies) -> None:
    """Warn where the checkpoint overrules `config.json`."""
    if ties.separate:
        logger.warning(
            "config.json ties the output projection to the embedding (tie_word_embeddings), but the checkpoint holds "
            "%s with other values, which are used.",
            ", ".join(ties.separate),
        )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return not one.is_meta and not other.is_meta and one.dtype == other.dtype and torch.equal(one, other)
