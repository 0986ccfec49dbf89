"""Backbones of pooling models: decoders without their head, encoders, and Transformers' models."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from penstock.checkpoints.architectures import MODERN_BERT, Architecture
from penstock.config import ModelConfig
from penstock.models.attention_layers import attend_in_both_directions
from penstock.models.weights import elsewhere
from penstock.parallel import ParallelState

# Prefixes of tensors in checkpoints with a head, by native class; of others it is `model.`.
_PREFIXES = {
    "GPT2LMHeadModel": "transformer.",
    **dict.fromkeys(("FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"), "backbone."),
}


class Backbone(NamedTuple):
    """model: a `CausalLM` that returns hidden states. prefix: of its tensors in checkpoints with a head.

    is_logits: its rows are the logits of classes. head_weight: name of the language model head's weight.
    """

    model: Any
    hidden_size: int
    prefix: str = ""
    is_logits: bool = False
    head_weight: str = ""


def make_backbone(config: ModelConfig, parallel: ParallelState) -> Backbone:
    """Build the backbone on the meta device. Raises what its class raises."""
    from penstock.models.registry import runs_through_transformers

    pooling = config.pooling
    assert pooling is not None, "a pooling model's configuration"
    if pooling.architecture.is_dual_encoder:
        from penstock.models.pooling.dual_encoder import DualEncoder

        dual = DualEncoder(config)
        return Backbone(dual, dual.hidden_size)
    if pooling.architecture.is_page_encoder:
        from penstock.models.pooling.page_encoder import PageEncoder

        pages = PageEncoder(config)
        return Backbone(pages, pages.hidden_size)
    if runs_through_transformers(config):
        from penstock.models.pooling.transformers_texts import TransformersTexts

        texts = TransformersTexts(config, parallel)
        return Backbone(texts, texts.hidden_size, is_logits=pooling.has_classes)
    if pooling.architecture.encoder is not None:
        encoder = _encoder_class(pooling.architecture)(config, parallel)
        return Backbone(encoder, encoder.hidden_size)
    return _decoder(config, parallel)


def _encoder_class(architecture: Architecture) -> Any:
    if architecture.encoder == MODERN_BERT:
        from penstock.models.modernbert import ModernBertEncoder

        return ModernBertEncoder
    from penstock.models.bert import BertEncoder

    return BertEncoder


def _decoder(config: ModelConfig, parallel: ParallelState) -> Backbone:
    pooling = config.pooling
    assert pooling is not None
    name = pooling.architecture.decoder
    assert name is not None, "other architectures run through Transformers"
    from penstock.models.registry import native_module

    model = getattr(import_module(native_module(name)), name)(config, parallel)
    head_weight = next(iter(model.tied_weights().values()), "lm_head.weight")
    model.lm_head = elsewhere()
    if not pooling.is_causal:
        attend_in_both_directions(model)
    return Backbone(model, config.hidden_size, _PREFIXES.get(name, "model."), head_weight=head_weight)
