"""Vision encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL against Transformers'."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.errors import ModelError, UnsupportedFeature
from penstock.kernels.native import NATIVE
from penstock.models.multimodal import vision_layers
from support.media_encoders import TEXT, assert_names_are_complete, encoder_of, full_config, make_encoder, random_model

of_native_kernels = pytest.mark.skipif(NATIVE is None, reason="rows of torch's products depend on each other")
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_TEXT = {**TEXT, **_ROPE}
_VISION = {"depth": 4, "num_heads": 4, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2VLForConditionalGeneration", {"embed_dim": 48, "hidden_size": 32, "mlp_ratio": 2}),
    "qwen2.5": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "hidden_size": 48,
            "intermediate_size": 72,
            "out_hidden_size": 32,
            "window_size": 24,
            "fullatt_block_indexes": [1, 3],
        },
    ),
    "qwen3": (
        "Qwen3VLForConditionalGeneration",
        {
            "hidden_size": 48,
            "intermediate_size": 72,
            "out_hidden_size": 32,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
    ),
    "qwen3-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "hidden_size": 48,
            "intermediate_size": 72,
            "out_hidden_size": 32,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [1],
        },
    ),
    "qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        {"hidden_size": 48, "intermediate_size": 72, "out_hidden_size": 32, "num_position_embeddings": 36},
    ),
}
# Frames, rows and columns of patches.
GRIDS = [(1, 2, 2), (1, 6, 10), (1, 12, 6), (1, 4, 26)]
VIDEOS = [(1, 4, 4), (3, 6, 8), (4, 10, 2)]


@cache
def model_of(family: str) -> PreTrainedModel:
    architecture, vision = FAMILIES[family]
    return random_model(architecture, text_config=_TEXT, vision_config={**_VISION, **vision})


def pixels(grid: tuple[int, int, int]) -> Tensor:
    torch.manual_seed(sum(grid))
    return torch.randn(grid[0] * grid[1] * grid[2], 3 * 2 * 4 * 4)


def expected(model: PreTrainedModel, values: Tensor, grid: tuple[int, int, int]) -> Tensor:
    output = model.get_image_features(values, torch.tensor([grid]))
    return torch.cat((output.pooler_output[0], *(level[0] for level in getattr(output, "deepstack_features", ()))), -1)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_an_image_are_those_of_transformers(family: str, grid: tuple[int, int, int]) -> None:
    model, values = model_of(family), pixels(grid)
    encoder = encoder_of(model)
    inputs = {"pixel_values": values, "image_grid_thw": torch.tensor([grid])}
    features = encoder.encode("image", inputs)
    assert features.shape == (grid[1] * grid[2] // 4, encoder.feature_size * (1 + encoder.num_levels))
    torch.testing.assert_close(features, expected(model, values, grid), rtol=1e-4, atol=1e-4)
    assert torch.equal(features, encoder.encode("image", inputs))


@pytest.mark.parametrize("grid", VIDEOS)
@pytest.mark.parametrize("family", ["qwen2", "qwen2.5", "qwen3"])
def test_features_of_a_video_are_those_of_transformers(family: str, grid: tuple[int, int, int]) -> None:
    model, values = model_of(family), pixels(grid)
    features = encoder_of(model).encode(
        "video", {"pixel_values_videos": values, "video_grid_thw": torch.tensor([grid])}
    )
    torch.testing.assert_close(features, expected(model, values, grid), rtol=1e-4, atol=1e-4)


@of_native_kernels
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_frames_that_are_encoded_some_at_a_time_have_the_same_bits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = (5, 6, 8)
    inputs = {"pixel_values_videos": pixels(grid), "video_grid_thw": torch.tensor([grid])}
    encoder = encoder_of(model_of(family))
    together = encoder.encode("video", inputs)
    monkeypatch.setattr(vision_layers, "_TOKENS_AT_ONCE", 100)
    assert torch.equal(encoder.encode("video", inputs), together)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_load_too(family: str, tmp_path: Path) -> None:
    assert_names_are_complete(model_of(family), tmp_path)


def test_tensors_of_the_language_model_are_not_the_encoders() -> None:
    encoder = encoder_of(model_of("qwen2.5"))
    assert encoder.checkpoint_name("model.language_model.layers.0.mlp.up_proj.weight") is None
    assert encoder.checkpoint_name("lm_head.weight") is None
    assert encoder.checkpoint_name("visual.merger.ln_q.weight") == "model.visual.merger.ln_q.weight"


@pytest.mark.parametrize("kept", ["weights_dtype", "dtype"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_gives_about_the_same_features(family: str, kept: str) -> None:
    model, grid = model_of(family), (1, 6, 10)
    inputs = {"pixel_values": pixels(grid), "image_grid_thw": torch.tensor([grid])}
    features = encoder_of(model, **{kept: torch.bfloat16}).encode("image", inputs)
    assert features.dtype is (torch.bfloat16 if kept == "dtype" else torch.float32)
    wanted = expected(model, pixels(grid), grid)
    assert (features.float() - wanted).abs().mean() < 0.05 * wanted.abs().mean()


def test_a_grid_that_does_not_fit_the_patches_is_an_error() -> None:
    inputs = {"pixel_values": pixels((1, 2, 2)), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    with pytest.raises(ModelError, match="4 patches, and the vision encoder takes 1 x 2 x 4"):
        encoder_of(model_of("qwen2.5")).encode("image", inputs)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_act", "mish", r"vision_config\.hidden_act='mish', which Qwen2_5_VLForConditionalGeneration"),
        ("window_size", 4, r"vision_config\.window_size=4, .* Supported: 8 or more"),
        ("hidden_size", 50, r"vision_config\.hidden_size=50, .*multiples of 4 heads"),
        ("fullatt_block_indexes", "all", r"fullatt_block_indexes='all', .* Supported: a list of indices of layers"),
        ("depth", None, r"vision_config\.depth=None\. It must be a positive integer"),
    ],
)
def test_an_unsupported_field_is_named(field: str, value: Any, message: str) -> None:
    config = full_config(model_of("qwen2.5"))
    config["vision_config"] = {**config["vision_config"], field: value}
    with pytest.raises((ModelError, UnsupportedFeature), match=message):
        make_encoder(config, ())


def test_a_level_after_the_last_layer_and_a_missing_object_are_named() -> None:
    config = full_config(model_of("qwen3"))
    vision = {**config["vision_config"], "deepstack_visual_indexes": [0, 4]}
    with pytest.raises(UnsupportedFeature, match=r"deepstack_visual_indexes=\[0, 4\], .* of depth=4 layers"):
        make_encoder({**config, "vision_config": vision}, ())
    with pytest.raises(ModelError, match=r"vision_config=None\. It must be an object"):
        make_encoder({**config, "vision_config": None}, ())
