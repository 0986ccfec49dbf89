"""Multimodal checkpoints: a `config.json` of a language model and encoders of images, audio or video.

Everything that runs the language model reads the *text view*: the configuration of the language model as if it were
published alone. The whole configuration is a field of it, for the encoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.checkpoints.architectures import DUAL_ENCODERS, PAGE_ENCODERS
from penstock.checkpoints.json_file import decode_floats
from penstock.errors import ModelError

# Field of the text view that holds the whole configuration.
_WHOLE = "multimodal_config"
# Ends of the architectures that have a configuration per part.
_ARCHITECTURES = ("ForConditionalGeneration", *DUAL_ENCODERS, *PAGE_ENCODERS)
# Field of the configurations whose parts are one level deeper.
_INNER = "vlm_config"
# Parts besides the language model, by the field of their configuration, and what each reads.
_PARTS = {"vision_config": "image", "audio_config": "audio"}
# Language models that Transformers has only as a part of a multimodal one: model type and class of the same layers.
_TEXT_CLASSES = {
    "qwen2_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_moe_text": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_5_text": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
# Model types whose tokens of an image attend to one another in both directions.
_BIDIRECTIONAL = ("gemma3",)
# Model types whose videos are images, frame by frame, so that their configuration has no token of videos.
_FRAMES = ("smolvlm", "internvl")
# Fields of the whole configuration that hold for the language model.
_SHARED = ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id", "pad_token_id")
# Settings of multimodal rotary embedding; text alone has equal positions in all sections.
_SECTIONS, _INTERLEAVED = "mrope_section", "mrope_interleaved"


@dataclass(frozen=True, slots=True)
class MultimodalCheckpoint:
    """The parts of a multimodal model.

    architecture: of the whole model. hf_config: its configuration with all defaults, as plain data. modalities: what
    its prompts may have besides text. rope_sections: pairs of rotated dimensions that take the temporal, the vertical
    and the horizontal position (M-RoPE, Qwen2-VL, https://arxiv.org/abs/2409.12191, section 2.1), if it has such;
    rope_is_interleaved: whether the three alternate.
    """

    architecture: str
    hf_config: Mapping[str, Any]
    modalities: tuple[str, ...]
    rope_sections: tuple[int, ...] | None = None
    rope_is_interleaved: bool = False

    @property
    def may_cut_items(self) -> bool:
        """Whether a chunk of a prompt may end inside an item: its tokens do not attend to later ones."""
        return self.hf_config.get("model_type") not in _BIDIRECTIONAL

    @classmethod
    def of(cls, text_view: Mapping[str, Any]) -> MultimodalCheckpoint | None:
        """The multimodal model that this is the text view of; None for a model of text alone."""
        fields = text_view.get(_WHOLE)
        return None if fields is None else cls(**fields)


def text_view(hf_config: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    """The text view of a multimodal `config.json`; other content as it is. model: its name, for errors.

    Raises ModelError for a configuration that Transformers does not read.
    """
    architecture = _architecture(hf_config)
    if architecture is None:
        return without_media(hf_config)
    parsed = _parsed(hf_config, model)
    text = parsed.get_text_config()
    if text is parsed:
        return hf_config
    whole, view = parsed.to_dict(), {**text.to_dict()}
    model_type = str(view.get("model_type"))
    view["model_type"], view["architectures"] = model_type, [_text_class(model_type, architecture)]
    if model_type in _TEXT_CLASSES:
        view["model_type"] = _TEXT_CLASSES[model_type][0]
    view["tie_word_embeddings"] = bool(whole.get("tie_word_embeddings", view.get("tie_word_embeddings")))
    given_text = hf_config.get("text_config")
    for source in (given_text if isinstance(given_text, Mapping) else {}, hf_config):
        view.update({name: source[name] for name in _SHARED if source.get(name) is not None})
    rope = view.get("rope_parameters")
    sections, is_interleaved = None, False
    if architecture in PAGE_ENCODERS:  # which run whole, by their class of Transformers
        view["architectures"] = [architecture]
    elif isinstance(rope, Mapping) and isinstance(rope.get(_SECTIONS), (list, tuple)):
        sections, is_interleaved = tuple(rope[_SECTIONS]), bool(rope.get(_INTERLEAVED, False))
        view["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    view[_WHOLE] = {
        "architecture": architecture,
        "hf_config": whole,
        "modalities": _modalities(whole),
        "rope_sections": sections,
        "rope_is_interleaved": is_interleaved,
    }
    return {name: value for name, value in view.items() if value is not None}


def without_media(text_view: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text view as a configuration of the language model alone, such as for a draft head."""
    return {name: value for name, value in text_view.items() if name != _WHOLE}


def _architecture(hf_config: Mapping[str, Any]) -> str | None:
    """Architecture of a multimodal model; None for another configuration."""
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        return None
    inner = hf_config.get(_INNER, hf_config)
    has_parts = isinstance(inner, Mapping) and any(isinstance(inner.get(name), Mapping) for name in _PARTS)
    return architectures[0] if has_parts and architectures[0].endswith(_ARCHITECTURES) else None


def _modalities(whole: Mapping[str, Any]) -> tuple[str, ...]:
    if _INNER in whole:
        return ("image",)
    named = [modality for field, modality in _PARTS.items() if isinstance(whole.get(field), Mapping)]
    has_token = whole.get("video_token_id") is not None or whole.get("video_token_index") is not None
    if has_token or whole.get("model_type") in _FRAMES:
        named.append("video")
    return tuple(named)


def _parsed(hf_config: Mapping[str, Any], model: str) -> Any:
    """The configuration as Transformers' class of the model type reads it."""
    import transformers

    model_type = hf_config.get("model_type")
    try:
        return transformers.AutoConfig.for_model(**decode_floats(hf_config))
    except Exception as error:
        raise ModelError(
            f"config.json of {model} (model_type={model_type!r}) is not one that Transformers "
            f"{transformers.__version__} takes: {error}"
        ) from error


def _text_class(model_type: str, architecture: str) -> str:
    if model_type in _TEXT_CLASSES:
        return _TEXT_CLASSES[model_type][1]
    from transformers.models.auto import modeling_auto

    # Without a class of its own the language model cannot run alone; the registry refuses the whole architecture.
    return str(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, architecture))
