"""Encoders take what Transformers' image processors make of one image of any size and aspect ratio."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from support.media_encoders import TEXT, encoder_of, random_model

_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 24, "patch_size": 4}
_LLAMA = {**TEXT, "model_type": "llama", "pad_token_id": 0}
_QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24]]
# Architecture, its configuration, the module and class of its image processor, and the processor's options.
CASES: dict[str, tuple[str, dict[str, Any], str, str, dict[str, Any]]] = {
    "qwen2.5": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": _QWEN_TEXT,
            "vision_config": {
                "depth": 2,
                "num_heads": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "patch_size": 4,
                "window_size": 24,
                "fullatt_block_indexes": [1],
            },
        },
        "qwen2_vl",
        "Qwen2VLImageProcessorPil",
        {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}},
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"text_config": _LLAMA, "vision_config": {**_TOWER, "image_size": 32, "patch_size": 4}},
        "smolvlm",
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}},
    ),
    "onevision": (
        "LlavaOnevisionForConditionalGeneration",
        {"text_config": _LLAMA, "vision_config": _SIGLIP, "image_grid_pinpoints": _PINPOINTS},
        "llava_onevision",
        "LlavaOnevisionImageProcessorPil",
        {"size": {"height": 24, "width": 24}, "image_grid_pinpoints": _PINPOINTS},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": _LLAMA,
            "vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 64, "patch_size": 4},
        },
        "pixtral",
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
    ),
}


def image_processor(module: str, name: str, options: dict[str, Any]) -> Callable[..., Any]:
    try:
        found = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    except ImportError:
        pytest.skip("this Transformers has no processors without torchvision")
    processor: Callable[..., Any] = getattr(found, name)(**options)
    return processor


@pytest.mark.parametrize("case", CASES)
def test_features_of_a_processed_image_are_those_of_transformers(case: str) -> None:
    architecture, config, module, name, options = CASES[case]
    process, model = image_processor(module, name, options), random_model(architecture, **config)
    encoder, generator = encoder_of(model), np.random.default_rng(0)
    for height, width in ((40, 60), (100, 31), (33, 33)):
        image = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        inputs = {key: torch.as_tensor(value) for key, value in process([image], return_tensors="pt").items()}
        features = encoder.encode("image", inputs)
        torch.testing.assert_close(features, expected(model, inputs), rtol=1e-4, atol=1e-4)


def expected(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    features: torch.Tensor = model.get_image_features(**inputs).pooler_output[0]
    return features
