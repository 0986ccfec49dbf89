"""Assembly of a multimodal model: the class of its language model, with an encoder of media beside it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from penstock.checkpoints.multimodal import MultimodalCheckpoint
from penstock.config import ModelConfig
from penstock.errors import UnsupportedFeature, UnsupportedModel
from penstock.layers.weights import WeightSlot
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import DecoderForCausalLM, DecoderModel
from penstock.models.multimodal.interface import MediaEncoder
from penstock.models.multimodal.registry import native_encoder, why_no_media
from penstock.models.weights import Elsewhere
from penstock.parallel import ParallelState

_TRANSFORMERS = "penstock.models.multimodal.transformers_encoder"
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


class WithEncoder(CausalLM):
    """Mixin of a language model whose checkpoint has an encoder of media.

    encoder: None where no prompt may have media, and on pipeline stages after the first.
    """

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        super().__init__(model_config, parallel)
        checkpoint, self.encoder = model_config.multimodal, None
        if checkpoint is None or not model_config.media_limits or not self.embeds_tokens:
            return
        self.encoder = _make_encoder(checkpoint)
        self.take_embeddings()
        if isinstance(self, DecoderForCausalLM):
            self.model.num_added_rows = _levels_here(self.encoder, self.model)
        self._ignored = re.compile("|".join(f"(?:{one})" for one in self.encoder.ignorable) or r"(?!)")

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = super().checkpoint_slots()  # type: ignore[safe-super]
        return slots if self.encoder is None else {**slots, **self.encoder.checkpoint_slots()}

    def checkpoint_name(self, name: str) -> str:
        own_name = language_name(name)
        if own_name is not None or self.encoder is None:
            return super().checkpoint_name(own_name or name)
        return self.encoder.checkpoint_name(name) or name

    def module_name(self, name: str) -> str:
        name = f"{name}."
        return super().module_name((language_name(name) or name).removesuffix("."))

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        own_name = language_name(name)
        if own_name is not None:
            yield from super().pieces(own_name, tensor)
        elif (own_name := self._encoder_name(name)) is not None:
            yield own_name, tensor

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, WeightSlot] | None = None
    ) -> None:
        super().load_weights(weights if slots is not None else self._own_weights(weights), slots)

    def _encoder_name(self, name: str) -> str | None:
        """Name of the encoder's slot of a tensor, or of one that no slot takes; None for a tensor to be ignored."""
        if self.encoder is None:
            return None
        own_name = self.encoder.checkpoint_name(name) or name
        return None if self._ignored.fullmatch(own_name) else own_name

    def _own_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            own_name = language_name(name) or self._encoder_name(name)
            if own_name is not None:
                yield own_name, tensor


@functools.cache
def with_encoder(language_model: Any) -> Any:
    """The class of a multimodal model with this language model's class."""
    return type(language_model.__name__, (WithEncoder, language_model), {"__module__": language_model.__module__})


def _make_encoder(checkpoint: MultimodalCheckpoint) -> MediaEncoder:
    # Features of sounds take the place of tokens in all models of audio alone.
    reason = None if checkpoint.modalities == ("audio",) else why_no_media(checkpoint.architecture)
    if reason is not None:
        raise UnsupportedModel(
            f"{checkpoint.architecture} takes no media here: {reason}. Start with language_model_only for prompts of "
            "text."
        )
    native = native_encoder(checkpoint.architecture, checkpoint.hf_config)
    if native is not None:
        return native
    # Imported where it is needed, since it imports Transformers' models.
    encoder: MediaEncoder = import_module(_TRANSFORMERS).TransformersEncoder(checkpoint)
    return encoder


def _levels_here(encoder: MediaEncoder, model: DecoderModel) -> int:
    """Levels of the encoder's features. Raises UnsupportedFeature unless this stage has the layers that take them."""
    num_layers, size = sum(not isinstance(layer, Elsewhere) for layer in model.layers), model.parallel.pipeline.size
    if encoder.num_levels > num_layers:
        raise UnsupportedFeature(
            f"pipeline_parallel_size={size} with features of {encoder.num_levels} levels (deepstack_visual_indexes): "
            f"layers 0 to {encoder.num_levels - 1} take them, and the first stage has {num_layers} layers. Start with "
            "fewer stages, or with language_model_only for prompts of text."
        )
    return encoder.num_levels
