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

# Architectures whose modules of Transformers give features that take the place of the image's tokens, and nothing else:
# answers are those of Transformers (docs/media_sweep.md).
_THROUGH_TRANSFORMERS = frozenset(
    {
        "AriaForConditionalGeneration",
        "AyaVisionForConditionalGeneration",
        "Cohere2VisionForConditionalGeneration",
        "DeepseekVLForConditionalGeneration",
        "Exaone4_5_ForConditionalGeneration",
        "GotOcr2ForConditionalGeneration",
        "Idefics2ForConditionalGeneration",
        "JanusForConditionalGeneration",
        "Lfm2VlForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "VideoLlama3ForConditionalGeneration",
        "VideoLlavaForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
    }
)
_TIMM = "its vision tower is a model of the package timm"
_POSITIONS = "its tokens of images have positions in height and width of another kind than Qwen-VL's"
_NAMES = "its checkpoints name the encoder's tensors otherwise than the modules of Transformers do"
_TEXT_IN_ENCODER = "its encoder of images reads the prompt's text too"
# Why others do not run.
_REASONS = {
    "CohereCompassForConditionalGeneration": _POSITIONS,
    "FastVlmForConditionalGeneration": _TIMM,
    "Gemma3nForConditionalGeneration": f"{_TIMM}, and its layers take further embeddings of each token",
    "HyperCLOVAXVisionV2ForConditionalGeneration": _NAMES,
    "InstructBlipForConditionalGeneration": _TEXT_IN_ENCODER,
    "InstructBlipVideoForConditionalGeneration": _TEXT_IN_ENCODER,
    "Kimi_K25ForConditionalGeneration": _NAMES,
    "MiniMaxM3SparseForConditionalGeneration": _NAMES,
    "Ovis2ForConditionalGeneration": "its encoder changes tokens beside the image's own too (visual indicators)",
    "PaliGemmaForConditionalGeneration": "its prompts attend in both directions, and it does not run alone either",
    "PerceptionLMForConditionalGeneration": _TIMM,
    "QianfanOCRForConditionalGeneration": _NAMES,
}
_NOT_COMPARED = "its answers to images have not been shown to be those of Transformers"


def has_native_encoder(architecture: str) -> bool:
    """Whether an architecture has a native encoder, at least with the vision towers that are native."""
    return architecture in _ENCODERS


def why_no_media(architecture: str) -> str | None:
    """The reason why a multimodal model takes text alone; None for one that takes media."""
    if architecture in _ENCODERS or architecture in _THROUGH_TRANSFORMERS:
        return None
    return _REASONS.get(architecture, _NOT_COMPARED)


def native_encoder(architecture: str, hf_config: Mapping[str, Any]) -> MediaEncoder | None:
    """Build the native encoder of an architecture; None without one.

    hf_config: the multimodal model's configuration, with the defaults of all fields. Raises what `MediaEncoder` does.
    """
    if architecture not in _ENCODERS:
        return None
    module, _, name = _ENCODERS[architecture].partition(":")
    encoder: MediaEncoder | None = getattr(import_module(module), name)(hf_config)
    return encoder
