"""Vision configurations as they lie beside published checkpoints: names and shapes of the weights are Transformers'."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

from penstock.models.multimodal.registry import native_encoder

_PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "patch_size": 14,
    "vision_use_head": False,
}
# Architecture, the vision configuration, and further fields.
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl-2b": (
        "Qwen2VLForConditionalGeneration",
        {
            "depth": 32,
            "embed_dim": 1280,
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_chans": 3,
            "hidden_size": 1536,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
        {},
    ),
    "qwen2.5-vl-3b": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        {},
    ),
    "qwen3-vl-4b": (
        "Qwen3VLForConditionalGeneration",
        {
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024,
            "in_channels": 3,
            "intermediate_size": 4096,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2560,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        {},
    ),
    "smolvlm-256m": (
        "SmolVLMForConditionalGeneration",
        {
            "hidden_size": 768,
            "image_size": 512,
            "max_image_size": {"longest_edge": 512},
            "num_attention_heads": 12,
            "patch_size": 16,
            "size": {"longest_edge": 2048},
            "use_base_siglip": False,
        },
        {"scale_factor": 4},
    ),
    "gemma-3-4b": (
        "Gemma3ForConditionalGeneration",
        {**_SIGLIP, "image_size": 896, "num_hidden_layers": 27},
        {"mm_tokens_per_image": 256},
    ),
    "llava-1.5-7b": (
        "LlavaForConditionalGeneration",
        {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
    ),
    "llava-onevision-0.5b": (
        "LlavaOnevisionForConditionalGeneration",
        {**_SIGLIP, "image_size": 384, "num_hidden_layers": 26},
        {"image_grid_pinpoints": _PINPOINTS, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "mistral-small-3.1": (
        "Mistral3ForConditionalGeneration",
        {
            "attention_dropout": 0.0,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "image_size": 1540,
            "intermediate_size": 4096,
            "model_type": "pixtral",
            "num_attention_heads": 16,
            "num_channels": 3,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "rope_theta": 10000.0,
        },
        {"spatial_merge_size": 2, "multimodal_projector_bias": False},
    ),
    "internvl3-1b": (
        "InternVLForConditionalGeneration",
        {
            "attention_bias": True,
            "hidden_act": "gelu",
            "hidden_size": 1024,
            "image_size": [448, 448],
            "intermediate_size": 4096,
            "layer_norm_eps": 1e-06,
            "layer_scale_init_value": 0.1,
            "model_type": "internvl_vision",
            "norm_type": "layer_norm",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": [14, 14],
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "use_qk_norm": False,
        },
        {"downsample_ratio": 0.5},
    ),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_names_and_shapes_of_the_weights_are_those_of_transformers(model: str) -> None:
    architecture, vision, fields = PUBLISHED[model]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(vision_config=vision, **fields)
    config.text_config.num_hidden_layers = 1
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = config.text_config.layer_types[:1]
    with torch.device("meta"):
        wanted = model_class(config)
        encoder = native_encoder(architecture, config.to_dict())
    assert encoder is not None, "every one is native"
    named = {encoder.checkpoint_name(name): tuple(x.shape) for name, x in wanted.state_dict().items()}
    ignorable = re.compile("|".join(encoder.ignorable) or r"(?!)")
    shapes = {name: shape for name, shape in named.items() if name is not None and not ignorable.fullmatch(name)}
    assert {name: slot.shape for name, slot in encoder.checkpoint_slots().items()} == shapes
    assert encoder.feature_size == config.text_config.hidden_size or architecture.startswith("Qwen")
