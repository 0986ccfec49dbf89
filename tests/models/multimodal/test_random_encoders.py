"""Whatever the configuration of an encoder says, and whatever the item's size, the features are Transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.media_encoders import TEXT, encoder_of, random_model

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_LLAMA = {**TEXT, "model_type": "llama", "pad_token_id": 0}
ACTIVATIONS = st.sampled_from(["gelu", "gelu_pytorch_tanh", "silu", "relu", "quick_gelu"])
GATED = st.sampled_from(["gelu", "gelu_pytorch_tanh", "silu"])
# Architecture, configuration and inputs.
Case = tuple[str, dict[str, Any], dict[str, Tensor]]


def tower(draw: st.DrawFn, **more: Any) -> dict[str, Any]:
    """Fields that vision configurations have in common."""
    num_heads, head_size = draw(st.integers(1, 3)), draw(st.sampled_from([4, 8, 20, 36]))
    return {
        "hidden_size": num_heads * head_size,
        "intermediate_size": draw(st.sampled_from([16, 40])),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": num_heads,
        "hidden_act": draw(ACTIVATIONS),
        "patch_size": draw(st.integers(2, 4)),
        **more,
    }


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@st.composite
def qwen(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"]))
    given_fields = tower(draw)
    depth, size = given_fields["num_hidden_layers"], given_fields["hidden_size"]
    merge_size, frames = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    patch_size = given_fields["patch_size"]
    vision = {
        "depth": depth,
        "num_heads": given_fields["num_attention_heads"],
        "patch_size": patch_size,
        "spatial_merge_size": merge_size,
        "temporal_patch_size": frames,
        "hidden_act": draw(GATED if family == "Qwen2_5_VL" else ACTIVATIONS),
        "hidden_size": size,
        "out_hidden_size": 32,
        "intermediate_size": given_fields["intermediate_size"],
    }
    layers = st.lists(st.integers(0, depth - 1), unique=True).map(sorted)
    if family == "Qwen2VL":
        vision |= {"embed_dim": size, "hidden_size": 32, "mlp_ratio": draw(st.integers(1, 3))}
    elif family == "Qwen2_5_VL":
        vision["window_size"] = merge_size * patch_size * draw(st.integers(1, 3))
        vision["fullatt_block_indexes"] = draw(layers)
    else:
        vision["num_position_embeddings"] = draw(st.sampled_from([4, 9, 25, 49]))
        vision["deepstack_visual_indexes"] = draw(layers)
    grid = draw(st.integers(1, 3)), merge_size * draw(st.integers(1, 5)), merge_size * draw(st.integers(1, 6))
    values = pixels(grid[0] * grid[1] * grid[2], 3 * frames * patch_size**2)
    config = {"text_config": {**TEXT, **_ROPE}, "vision_config": vision}
    inputs = {"pixel_values": values, "image_grid_thw": torch.tensor([grid])}
    return f"{family}ForConditionalGeneration", config, inputs


@st.composite
def idefics3(draw: st.DrawFn) -> Case:
    vision = tower(draw)
    vision["image_size"] = vision["patch_size"] * draw(st.sampled_from([2, 4, 6]))
    num_tiles, side = draw(st.integers(1, 3)), vision["patch_size"] * draw(st.sampled_from([2, 4, 6]))
    inputs = {"pixel_values": pixels(1, num_tiles, 3, side, side)}
    if draw(st.booleans()):
        mask = inputs["pixel_attention_mask"] = torch.zeros(1, num_tiles, side, side, dtype=torch.int64)
        for of_tile in mask[0]:
            of_tile[: draw(st.integers(1, side)), : draw(st.integers(1, side))] = 1
    config = {"text_config": _LLAMA, "vision_config": vision, "scale_factor": draw(st.integers(1, 2))}
    return "Idefics3ForConditionalGeneration", config, inputs


@st.composite
def llava(draw: st.DrawFn) -> Case:
    model_type = draw(st.sampled_from(["clip_vision_model", "siglip_vision_model", "pixtral"]))
    vision = tower(draw, model_type=model_type)
    side = vision["image_size"] = vision["patch_size"] * draw(st.sampled_from([2, 5]))
    depth = vision["num_hidden_layers"]
    # Transformers has no input of the first layer to choose.
    layers = st.integers(-depth, depth).filter(bool)
    config = {
        "text_config": _LLAMA,
        "vision_config": vision,
        "vision_feature_layer": draw(layers | st.lists(layers, min_size=1, max_size=3)),
        "vision_feature_select_strategy": draw(st.sampled_from(["default", "full"])),
        "projector_hidden_act": draw(ACTIVATIONS),
        "multimodal_projector_bias": draw(st.booleans()),
    }
    inputs = {"pixel_values": pixels(1, 3, side, side)}
    if model_type == "siglip_vision_model":
        vision["vision_use_head"] = False
    elif model_type == "pixtral":
        vision["hidden_act"], config["vision_feature_select_strategy"] = draw(GATED), "full"
        height, width = (vision["patch_size"] * draw(st.integers(1, 6)) for _ in range(2))
        inputs = {"pixel_values": pixels(1, 3, height + 3, width), "image_sizes": torch.tensor([[height, width]])}
    return "LlavaForConditionalGeneration", config, inputs


@st.composite
def internvl(draw: st.DrawFn) -> Case:
    flags = ("use_qk_norm", "attention_bias", "use_mean_pooling", "use_absolute_position_embeddings")
    vision = tower(draw, model_type="internvl_vision", **{flag: draw(st.booleans()) for flag in flags})
    side = vision["patch_size"] * draw(st.sampled_from([2, 4]))
    vision |= {"image_size": [side, side], "patch_size": [vision["patch_size"]] * 2}
    vision["norm_type"] = draw(st.sampled_from(["layer_norm", "rms_norm"]))
    depth = vision["num_hidden_layers"]
    config = {
        "text_config": _LLAMA,
        "vision_config": vision,
        "vision_feature_layer": draw(st.sampled_from([-1, -depth, depth])),
        "projector_hidden_act": draw(ACTIVATIONS),
    }
    return "InternVLForConditionalGeneration", config, {"pixel_values": pixels(draw(st.integers(1, 3)), 3, side, side)}


CASES = {"qwen": qwen(), "idefics3": idefics3(), "llava": llava(), "internvl": internvl()}


@pytest.mark.parametrize("family", CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_configuration_gives_transformers_features(family: str, data: st.DataObject) -> None:
    architecture, config, inputs = data.draw(CASES[family])
    model = random_model(architecture, **config)
    output = model.get_image_features(**inputs)
    features = output.pooler_output
    wanted = features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(list(features))
    wanted = torch.cat((wanted, *(level[0] for level in getattr(output, "deepstack_features", ()))), -1)
    found = encoder_of(model).encode("image", inputs)
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4 * max(1.0, float(wanted.abs().max())))
