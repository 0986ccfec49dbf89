"""Encoders of SmolVLM, Idefics3 and Gemma 3 against Transformers'."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.errors import ModelError
from penstock.kernels.native import NATIVE
from penstock.layers.quantization.method import choose_method
from penstock.models.multimodal import vision_layers
from support.media_encoders import TEXT, assert_names_are_complete, encoder_of, random_model

of_native_kernels = pytest.mark.skipif(NATIVE is None, reason="rows of torch's products depend on each other")
_VISION = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}
IDEFICS = ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration")


@cache
def idefics(architecture: str = IDEFICS[0], scale_factor: int = 2) -> PreTrainedModel:
    text = {**TEXT, "model_type": "llama", "pad_token_id": 0}
    return random_model(architecture, text_config=text, vision_config=_VISION, scale_factor=scale_factor)


@cache
def gemma3(**vision: Any) -> PreTrainedModel:
    tower = {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False, **vision}
    return random_model("Gemma3ForConditionalGeneration", text_config=TEXT, vision_config=tower, mm_tokens_per_image=16)


def images(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape)


def expected(model: PreTrainedModel, **inputs: Tensor) -> Tensor:
    features = model.get_image_features(**inputs).pooler_output
    return features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(list(features))


@pytest.mark.parametrize("size", [32, 16, 24])
@pytest.mark.parametrize("num_tiles", [1, 5])
@pytest.mark.parametrize("architecture", IDEFICS)
def test_features_of_tiles_are_those_of_transformers(architecture: str, num_tiles: int, size: int) -> None:
    model, inputs = idefics(architecture), {"pixel_values": images(1, num_tiles, 3, size, size)}
    encoder = encoder_of(model)
    features = encoder.encode("image", inputs)
    assert features.shape == (num_tiles * (size // 8) ** 2, encoder.feature_size)
    torch.testing.assert_close(features, expected(model, **inputs), rtol=1e-4, atol=1e-4)
    with_mask = {**inputs, "pixel_attention_mask": torch.ones(1, num_tiles, size, size, dtype=torch.int64)}
    assert torch.equal(features, encoder.encode("image", with_mask))


def test_patches_without_pixels_are_not_attended_to() -> None:
    model = idefics()
    mask = torch.zeros(1, 3, 32, 32, dtype=torch.int64)
    mask[0, 0] = 1
    mask[0, 1, :20, :32] = 1
    mask[0, 2, :32, :9] = 1
    inputs = {"pixel_values": images(1, 3, 3, 32, 32), "pixel_attention_mask": mask}
    features = encoder_of(model).encode("image", inputs)
    torch.testing.assert_close(features, expected(model, **inputs), rtol=1e-4, atol=1e-4)


def test_pixel_shuffle_takes_any_factor() -> None:
    model, inputs = idefics(scale_factor=4), {"pixel_values": images(1, 2, 3, 32, 32)}
    features = encoder_of(model).encode("video", inputs)
    torch.testing.assert_close(features, expected(model, **inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_images", [1, 3])
@pytest.mark.parametrize("image_size", [32, 36, 48])
def test_features_of_gemma3_are_those_of_transformers(image_size: int, num_images: int) -> None:
    model, inputs = gemma3(image_size=image_size), {"pixel_values": images(num_images, 3, image_size, image_size)}
    features = encoder_of(model).encode("image", inputs)
    assert features.shape == (num_images * 16, 32)
    torch.testing.assert_close(features, expected(model, **inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [idefics, gemma3])
def test_published_names_load_too(make: Any, tmp_path: Path) -> None:
    assert_names_are_complete(make(), tmp_path)


@of_native_kernels
def test_a_tile_has_the_same_bits_alone_and_among_others() -> None:
    pixels = images(1, 7, 3, 32, 32)
    encoder = encoder_of(idefics())
    together = encoder.encode("image", {"pixel_values": pixels}).view(7, 16, -1)
    for tile in range(7):
        alone = encoder.encode("image", {"pixel_values": pixels[:, tile : tile + 1].contiguous()})
        assert torch.equal(alone, together[tile])


@of_native_kernels
def test_tiles_that_are_encoded_some_at_a_time_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    of_tiles, of_crops = {"pixel_values": images(1, 5, 3, 32, 32)}, {"pixel_values": images(3, 3, 32, 32)}
    encoders = [(encoder_of(idefics()), of_tiles), (encoder_of(gemma3()), of_crops)]
    together = [encoder.encode("image", inputs) for encoder, inputs in encoders]
    monkeypatch.setattr(vision_layers, "_TOKENS_AT_ONCE", 130)
    for (encoder, inputs), features in zip(encoders, together, strict=True):
        assert torch.equal(encoder.encode("image", inputs), features)


@pytest.mark.parametrize("make", [idefics, gemma3])
def test_narrow_weights_give_about_the_same_features(make: Any) -> None:
    model, pixels = make(), images(1, 1, 3, 32, 32)[: 1 if make is idefics else None]
    pixels = pixels if make is idefics else pixels[0]
    wanted = encoder_of(model).encode("image", {"pixel_values": pixels})
    options: list[dict[str, Any]] = [{name: torch.bfloat16} for name in ("weights_dtype", "dtype")]
    for option in (*options, {"choose": choose_method("int8")}):
        features = encoder_of(model, **option).encode("image", {"pixel_values": pixels}).float()
        assert 0 < (features - wanted).abs().mean() < 0.05 * wanted.abs().mean()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_layers_that_are_quantized_while_they_are_loaded_are_the_same(quantization: str) -> None:
    pixels, choose = {"pixel_values": images(1, 3, 32, 32)}, choose_method(quantization)
    features = [encoder_of(gemma3(), choose=choose, by_layer=late).encode("image", pixels) for late in (False, True)]
    assert torch.equal(*features)


def test_images_of_another_size_are_an_error() -> None:
    with pytest.raises(ModelError, match="takes images of 32 x 32"):
        encoder_of(gemma3()).encode("image", {"pixel_values": images(1, 3, 36, 32)})
    with pytest.raises(ModelError, match="takes squares with multiples of 2 patches of 4 pixels"):
        encoder_of(idefics()).encode("image", {"pixel_values": images(1, 1, 3, 36, 36)})
    with pytest.raises(ModelError, match="with 3 channels"):
        encoder_of(idefics()).encode("image", {"pixel_values": images(1, 1, 1, 32, 32)})
