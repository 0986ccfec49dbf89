"""Encoders of LLaVA, LLaVA-NeXT, LLaVA-OneVision, Mistral 3 and InternVL against Transformers'."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.errors import ModelError, UnsupportedFeature
from penstock.models.multimodal.registry import native_encoder
from support.media_encoders import TEXT, assert_names_are_complete, encoder_of, full_config, random_model

_VISION = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
}
_LLAMA = {**TEXT, "model_type": "llama", "pad_token_id": 0}
_PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
LLAVA, ONEVISION = "LlavaForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"
NEXT = "LlavaNextForConditionalGeneration"
MISTRAL3, INTERNVL = "Mistral3ForConditionalGeneration", "InternVLForConditionalGeneration"
# Model type of the vision configuration, and fields of the whole one.
FAMILIES = {
    LLAVA: ("clip_vision_model", {}),
    ONEVISION: ("siglip_vision_model", {"image_grid_pinpoints": _PINPOINTS, "vision_feature_layer": -1}),
    NEXT: ("clip_vision_model", {"image_grid_pinpoints": _PINPOINTS}),
    MISTRAL3: ("pixtral", {}),
    INTERNVL: ("internvl_vision", {}),
}


@cache
def model_of(architecture: str, tower: str | None = None, vision: Any = (), **fields: Any) -> PreTrainedModel:
    own_tower, own_fields = FAMILIES[architecture]
    # Transformers tells list fields apart from integers.
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    config = {**_VISION, "model_type": tower or own_tower, **dict(vision)}
    if config["model_type"] == "siglip_vision_model":
        config["vision_use_head"] = False
    return random_model(architecture, text_config=_LLAMA, vision_config=config, **{**own_fields, **fields})


def images(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape)


def expected(model: PreTrainedModel, modality: str = "image", **inputs: Tensor) -> Tensor:
    get = model.get_video_features if modality == "video" else model.get_image_features
    features = get(**inputs).pooler_output
    return features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(list(features))


def assert_equal_features(model: PreTrainedModel, modality: str = "image", **inputs: Tensor) -> Tensor:
    encoder = encoder_of(model)
    features, wanted = encoder.encode(modality, inputs), expected(model, modality, **inputs)
    torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(features, encoder.encode(modality, inputs))
    return features


@pytest.mark.parametrize(
    ("layer", "strategy"), [(-2, "default"), (-1, "full"), (2, "default"), ((-2, 1, 0), "default"), ((-1, -3), "full")]
)
def test_llava_projects_the_layers_that_are_asked_for(layer: int | tuple[int, ...], strategy: str) -> None:
    model = model_of(LLAVA, vision_feature_layer=layer, vision_feature_select_strategy=strategy)
    features = assert_equal_features(model, pixel_values=images(1, 3, 24, 24))
    assert features.shape == (36 + (strategy == "full"), 32)


def test_llava_takes_siglip_as_its_tower() -> None:
    model = model_of(LLAVA, tower="siglip_vision_model", vision_feature_layer=-1, vision_feature_select_strategy="full")
    assert_equal_features(model, pixel_values=images(1, 3, 24, 24))


@pytest.mark.parametrize("size", [(24, 24), (16, 40), (12, 8)])
def test_llava_takes_pixtral_as_its_tower(size: tuple[int, int]) -> None:
    model = model_of(LLAVA, tower="pixtral", vision_feature_layer=-1, vision_feature_select_strategy="full")
    pixels = torch.zeros(1, 3, 24, 48)
    pixels[:, :, : size[0], : size[1]] = images(1, 3, *size)
    features = assert_equal_features(model, pixel_values=pixels, image_sizes=torch.tensor([size]))
    assert len(features) == size[0] * size[1] // 16


def test_layers_after_the_features_are_not_loaded() -> None:
    encoder = native_encoder(LLAVA, full_config(model_of(LLAVA)))
    assert encoder is not None, "LLaVA on CLIP is native"
    layers = {name.split(".layers.")[1][0] for name in encoder.checkpoint_slots() if ".layers." in name}
    assert layers == {"0", "1", "2"}


@pytest.mark.parametrize(("height", "width"), [(24, 24), (100, 30), (31, 100), (50, 47), (17, 24)])
@pytest.mark.parametrize("ratio", ["anyres_max_9", "anyres_max_2", None])
def test_tiles_are_packed_without_their_padding(ratio: str | None, height: int, width: int) -> None:
    model = model_of(NEXT) if ratio is None else model_of(ONEVISION, vision_aspect_ratio=ratio)
    size = torch.tensor([[height, width]])
    for tiles in range(2, 7):
        pixels = images(1, tiles, 3, 24, 24)
        try:
            expected(model, pixel_values=pixels, image_sizes=size)
        except RuntimeError:  # another number of tiles
            continue
        assert_equal_features(model, pixel_values=pixels, image_sizes=size)
        return
    raise AssertionError("no number of tiles fits")


def test_onevision_takes_one_of_several_images_whole() -> None:
    inputs = {"pixel_values": images(1, 3, 3, 24, 24), "image_sizes": torch.tensor([[24, 48]])}
    features = encoder_of(model_of(ONEVISION)).encode("image", {**inputs, "batch_num_images": torch.tensor([2])})
    wanted = expected(model_of(ONEVISION), **inputs, batch_num_images=torch.tensor([1]))[:36]
    torch.testing.assert_close(features[:36], wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(features[36], model_of(ONEVISION).model.image_newline)


@pytest.mark.parametrize("side", [6, 5])
def test_onevision_shrinks_the_frames_of_a_video(side: int) -> None:
    model = model_of(ONEVISION, vision=(("image_size", 4 * side),))
    features = assert_equal_features(model, "video", pixel_values_videos=images(1, 3, 3, 4 * side, 4 * side))
    assert len(features) == 3 * 9 + 1


@pytest.mark.parametrize("size", [(24, 24), (16, 40), (8, 16)])
@pytest.mark.parametrize("merge_size", [2, 1])
def test_mistral3_merges_squares_of_patches(merge_size: int, size: tuple[int, int]) -> None:
    model = model_of(MISTRAL3, spatial_merge_size=merge_size)
    pixels = torch.zeros(1, 3, 40, 48)
    pixels[:, :, : size[0], : size[1]] = images(1, 3, *size)
    assert_equal_features(model, pixel_values=pixels, image_sizes=torch.tensor([size]))


@pytest.mark.parametrize(
    ("vision", "layer"),
    [
        ((), -1),
        ((), -2),
        ((("use_mean_pooling", False),), -1),
        ((("use_mean_pooling", False),), 4),
        ((("use_qk_norm", True), ("norm_type", "rms_norm"), ("attention_bias", True)), -1),
        ((("use_absolute_position_embeddings", False), ("use_mask_token", True)), 3),
    ],
)
def test_internvl_shuffles_the_patches_of_its_tiles(vision: tuple[tuple[str, Any], ...], layer: int) -> None:
    model = model_of(INTERNVL, vision=(*vision, ("image_size", (24, 24))), vision_feature_layer=layer)
    for num_tiles in (1, 3):
        features = assert_equal_features(model, pixel_values=images(num_tiles, 3, 24, 24))
        assert features.shape == (num_tiles * 9, 32)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_published_names_load_too(architecture: str, tmp_path: Path) -> None:
    assert_names_are_complete(model_of(architecture), tmp_path)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_bfloat16_gives_about_the_same_features(architecture: str) -> None:
    model, inputs = model_of(architecture), {"pixel_values": images(1, 3, 24, 24)}
    if architecture in (ONEVISION, MISTRAL3):
        inputs["image_sizes"] = torch.tensor([[24, 24]])
    if architecture == NEXT:
        inputs = {"pixel_values": images(1, 3, 3, 24, 24), "image_sizes": torch.tensor([[24, 48]])}
    if architecture == ONEVISION:
        inputs["batch_num_images"] = torch.tensor([2])
    wanted = encoder_of(model).encode("image", inputs)
    for name in ("weights_dtype", "dtype"):
        features = encoder_of(model, **{name: torch.bfloat16}).encode("image", inputs).float()
        assert 0 < (features - wanted).abs().mean() < 0.05 * wanted.abs().mean()


def test_a_tower_without_a_native_implementation_leaves_the_model_to_transformers() -> None:
    config = full_config(model_of(LLAVA))
    config["vision_config"] = {**config["vision_config"], "model_type": "vit"}
    assert native_encoder(LLAVA, config) is None
    assert native_encoder("AnotherForConditionalGeneration", config) is None


def test_wrong_fields_and_inputs_are_named() -> None:
    config = full_config(model_of(LLAVA))
    with pytest.raises(UnsupportedFeature, match=r"vision_feature_layer=7, .* Supported: integers from -5 to 4"):
        native_encoder(LLAVA, {**config, "vision_feature_layer": 7})
    with pytest.raises(UnsupportedFeature, match=r"vision_aspect_ratio='anyres', .* Supported: anyres_max_ and"):
        native_encoder(ONEVISION, {**full_config(model_of(ONEVISION)), "vision_aspect_ratio": "anyres"})
    with pytest.raises(ModelError, match=r"pixels of the shape \[1, 3, 28, 24\], and .* takes images of 24 x 24"):
        encoder_of(model_of(LLAVA)).encode("image", {"pixel_values": images(1, 3, 28, 24)})
