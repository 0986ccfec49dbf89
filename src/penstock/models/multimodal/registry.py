"""Registry of native media encoders by the architecture of the multimodal model. A module is imported at first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from penstock.models.multimodal.interface import MediaEncoder

# Module and function, or class, that makes the encoder from the configuration; a function may return None.
_QWEN = "penstock.models.multimodal.qwen_vision"
_SIGLIP = "penstock.models.multimodal.siglip"
_WHISPER = "penstock.models.multimodal.whisper_audio"
_ENCODERS = {
    "Gemma3ForConditionalGeneration": f"{_SIGLIP}:Gemma3Vision",
    "Idefics3ForConditionalGeneration": f"{_SIGLIP}:Idefics3Vision",
    "InternVLForConditionalGeneration": "penstock.models.multimodal.intern_vit:InternVision",
    "LlavaForConditionalGeneration": "penstock.models.multimodal.clip:llava_vision",
    "LlavaNextForConditionalGeneration": "penstock.models.multimodal.clip:llava_next",
    "LlavaOnevisionForConditionalGeneration": "penstock.models.multimodal.clip:onevision",
    "Mistral3ForConditionalGeneration": "penstock.models.multimodal.pixtral:mistral3_vision",
    "Qwen2AudioForConditionalGeneration": f"{_WHISPER}:Qwen2Audio",
    "Qwen2VLForConditionalGeneration": f"{_QWEN}:Qwen2Vision",
    "Qwen2_5_VLForConditionalGeneration": f"{_QWEN}:Qwen25Vision",
    "Qwen3VLForConditionalGeneration": f"{_QWEN}:Qwen3Vision",
    "Qwen3VLMoeForConditionalGeneration": f"{_QWEN}:Qwen3Vision",
    "Qwen3_5ForConditionalGeneration": f"{_QWEN}:Qwen3Vision",
    "Qwen3_5MoeForConditionalGeneration": f"{_QWEN}:Qwen3Vision",
    "SmolVLMForConditionalGeneration": f"{_SIGLIP}:SmolVLMVision",
    "VoxtralForConditionalGeneration": f"{_WHISPER}:Voxtral",
}


def has_native_encoder(architecture: str) -> bool:
    """Whether an architecture has a native encoder, at least with the vision towers that are native."""
    return architecture in _ENCODERS


def native_encoder(architecture: str, hf_config: Mapping[str, Any]) -> MediaEncoder | None:
    """Build the native encoder of an architecture; None without one.

    hf_config: the multimodal model's configuration, with the defaults of all fields. Raises what `MediaEncoder` does.
    """
    if architecture not in _ENCODERS:
        return None
    module, _, name = _ENCODERS[architecture].partition(":")
    encoder: MediaEncoder | None = getattr(import_module(module), name)(hf_config)
    return encoder
