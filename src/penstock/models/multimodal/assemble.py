"""Assembly of a multimodal model: the class of its language model, with the weights of the encoders beside it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from penstock.layers.weights import WeightSlot
from penstock.models.causal_lm import CausalLM

# Beginnings of the names of the language model's tensors in multimodal checkpoints, and their own names.
_LANGUAGE_PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
)
_LANGUAGE_MODULES = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")


def language_name(name: str) -> str | None:
    """Name of a tensor of the language model in a checkpoint of this model alone; None for another tensor."""
    for prefix, own in _LANGUAGE_PREFIXES:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name if name.startswith(_LANGUAGE_MODULES) else None


class _WithEncoder(CausalLM):
    """Mixin of a language model whose checkpoint holds encoders, too."""

    def checkpoint_name(self, name: str) -> str:
        return super().checkpoint_name(language_name(name) or name)

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        own_name = language_name(name)
        if own_name is not None:
            yield from super().pieces(own_name, tensor)

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, WeightSlot] | None = None
    ) -> None:
        if slots is None:
            weights = ((own_name, tensor) for name, tensor in weights if (own_name := language_name(name)) is not None)
        super().load_weights(weights, slots)


@functools.cache
def with_encoder(language_model: Any) -> Any:
    """The class of a multimodal model with this language model's class."""
    return type(language_model.__name__, (_WithEncoder, language_model), {"__module__": language_model.__module__})
