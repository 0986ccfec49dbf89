"""Small random multimodal models of Transformers, with the published layout of their configurations."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from support.checkpoints import VOCAB_SIZE
from support.transformers_models import TINY, randomise

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_TEXT = {**TINY, "head_dim": 16}
# Ids of special tokens at the end of the vocabulary.
IMAGE, VIDEO, VISION_START, VISION_END = VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3, VOCAB_SIZE - 4
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

# By name: model type, text configuration, vision configuration, and other fields.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (
        "qwen2_vl",
        {"rope_parameters": _SECTIONS},
        {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        _QWEN_IDS,
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {"rope_parameters": _SECTIONS},
        {
            **_QWEN_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        _QWEN_IDS,
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}},
        {
            **_QWEN_VISION,
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        _QWEN_IDS,
    ),
    "gemma3": (
        "gemma3",
        {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16},
        _VISION,
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE},
    ),
    "llava": (
        "llava",
        {"model_type": "llama"},
        {**_VISION, "model_type": "clip_vision_model"},
        {"image_token_index": IMAGE},
    ),
    "smolvlm": ("smolvlm", {"model_type": "llama"}, _VISION, {"image_token_id": IMAGE, "scale_factor": 2}),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {**_VISION, "model_type": "pixtral", "head_dim": 16},
        {"image_token_index": IMAGE, "spatial_merge_size": 2},
    ),
    "internvl": (
        "internvl",
        {"model_type": "qwen2"},
        {**_VISION, "patch_size": [4, 4], "image_size": [16, 16]},
        {"image_token_id": IMAGE},
    ),
    "llama4": (
        "llama4",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 8,
        },
        {**_VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        {"image_token_index": IMAGE},
    ),
}


def tiny_multimodal_model(name: str, *, seed: int = 0, **text: Any) -> PreTrainedModel:
    """A small model with random weights. text: fields of the language model's configuration."""
    model_type, of_text, vision, other = FAMILIES[name]
    fields = {**_TEXT, **of_text, **text}
    config = transformers.AutoConfig.for_model(
        model_type, text_config=fields, vision_config=dict(vision), tie_word_embeddings=False, **other
    )
    mapping = transformers.AutoModelForImageTextToText._model_mapping
    return randomise(mapping[type(config)]._from_config(config), seed)
