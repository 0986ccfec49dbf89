"""Encoder-decoder models: the encoder runs once for a request, and all of its tokens attend to the output."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature
from penstock.features.encoder_decoder.messages import AlignmentPart, SourcePart, SpeechPart, SpeechResult, StepSpeech

_SIDES = "penstock.features.encoder_decoder"


def _has_encoder(config: EngineConfig) -> bool:
    return config.model.is_encoder_decoder


FEATURE = Feature(
    name="encoder_decoder",
    is_on=_has_encoder,
    parts=(SourcePart, SpeechPart, AlignmentPart, SpeechResult, StepSpeech),
    scheduler_side=f"{_SIDES}.scheduling:SourceScheduling",
    worker_side=f"{_SIDES}.worker:SourceEncoding",
    memory={"encoder activations": f"{_SIDES}.memory:encoder_bytes"},
    how_to_turn_on="Send the request to an encoder-decoder model.",
)
