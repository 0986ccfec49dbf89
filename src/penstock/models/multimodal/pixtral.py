"""Pixtral (Agrawal et al. 2024, https://arxiv.org/abs/2410.07073) as a vision tower, and the encoder of Mistral 3.

Suffixes: N images, T patches of all, L tokens of an item, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT
from penstock.layers.linear import LinearLayer
from penstock.layers.norm import RMSNorm
from penstock.models.config_fields import Fields
from penstock.models.multimodal.interface import DummyItem
from penstock.models.multimodal.vision_layers import (
    PROJECTOR,
    PROJECTOR_TABLE,
    TOWER,
    AxialRotary,
    PatchEmbedding,
    Projector,
    Segments,
    TowerEncoder,
    VisionLayerConfig,
    VisionLayers,
    encoder_fields,
    feature_layers,
    host_integers,
    merge_neighbours,
    near_square,
    rope_theta,
    square,
    vision_activation,
)
from penstock.models.weights import Into, WeightTable


class PixtralTower(nn.Module):
    """Patches, a norm, and layers with rotary embedding by row and column. num_layers: the first ones; None for all."""

    num_leading_tokens: ClassVar[int] = 0

    def __init__(self, fields: Fields, num_layers: int | None = None) -> None:
        super().__init__()
        self.config = config = VisionLayerConfig.read(
            fields,
            norm_eps=1e-5,
            has_rms_norm=True,
            is_gated=True,
            mlp_bias=False,
            qkv_bias=False,
            out_bias=False,
        )
        self.patch_size = square(fields, "patch_size")
        self.num_layers = fields.integer("num_hidden_layers") if num_layers is None else num_layers
        kernel = [self.patch_size] * 2
        self.patch_embedding = PatchEmbedding(fields.integer("num_channels", 3), kernel, config.hidden_size, bias=False)
        self.first_norm = config.norm()
        fields.refuse_others({"head_dim": config.head_size})
        if config.head_size % 4 != 0:
            raise fields.unsupported("hidden_size", config.hidden_size, f"multiples of 4 * {config.num_heads} heads")
        exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32, device="cpu") / config.head_size
        frequencies = 1.0 / rope_theta(fields) ** exponents
        self.rotary = AxialRotary(frequencies[0::2].clone(), frequencies[1::2].clone())
        self.layers = VisionLayers(config, self.num_layers)

    def forward(self, images_NCHW: Tensor, wanted: Sequence[int]) -> list[Tensor]:
        """Hidden states [T, D] of images of any one size, after these numbers of layers, ascending."""
        num_images, device = len(images_NCHW), images_NCHW.device
        hidden_TD = self.first_norm(self.patch_embedding.embed_images(images_NCHW))
        rows, columns = (pixels // self.patch_size for pixels in images_NCHW.shape[2:])
        raster = torch.arange(rows * columns, device=device).repeat(num_images)
        rotation = self.rotary(raster // columns, raster % columns, (rows, columns), hidden_TD.dtype)
        segments = Segments.equal(num_images, rows * columns, device)
        return self.layers(hidden_TD, rotation, segments, wanted)  # type: ignore[no-any-return]

    @staticmethod
    def table(prefix: str) -> WeightTable:
        """The tower's tensors, as the submodule `tower` of an encoder. prefix: of their names."""
        layer = f"{prefix}transformer.layers.*"
        return {
            f"{prefix}patch_conv": Into("tower.patch_embedding"),
            f"{prefix}ln_pre": Into("tower.first_norm"),
            f"{layer}.attention_norm": Into("tower.layers.*.attention_norm"),
            f"{layer}.attention.q_proj": Into("tower.layers.*.attention.qkv_proj", shard="q"),
            f"{layer}.attention.k_proj": Into("tower.layers.*.attention.qkv_proj", shard="k"),
            f"{layer}.attention.v_proj": Into("tower.layers.*.attention.qkv_proj", shard="v"),
            f"{layer}.attention.o_proj": Into("tower.layers.*.attention.o_proj"),
            f"{layer}.ffn_norm": Into("tower.layers.*.mlp_norm"),
            f"{layer}.feed_forward.gate_proj": Into("tower.layers.*.mlp.gate_up_proj", shard="gate"),
            f"{layer}.feed_forward.up_proj": Into("tower.layers.*.mlp.gate_up_proj", shard="up"),
            f"{layer}.feed_forward.down_proj": Into("tower.layers.*.mlp.down_proj"),
        }


_MISTRAL3: WeightTable = {
    **PixtralTower.table(TOWER),
    **PROJECTOR_TABLE,
    f"{PROJECTOR}norm": Into("norm"),
    f"{PROJECTOR}patch_merger.merging_layer": Into("merger"),
}


def mistral3_vision(hf_config: Mapping[str, Any]) -> Mistral3Vision | None:
    """The encoder of Mistral 3; None with another tower than Pixtral."""
    return Mistral3Vision(hf_config) if hf_config["vision_config"].get("model_type") == "pixtral" else None


class Mistral3Vision(TowerEncoder):
    """The encoder of Mistral 3: Pixtral, of which squares of patches are merged and projected."""

    table = _MISTRAL3

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        fields = encoder_fields(hf_config)
        vision, text = fields.section("vision_config"), fields.section("text_config")
        layers = feature_layers(fields, vision.integer("num_hidden_layers"), -1)
        if layers != [vision.integer("num_hidden_layers")]:
            raise fields.unsupported("vision_feature_layer", fields.hf_config["vision_feature_layer"], "-1")
        self.tower = PixtralTower(vision)
        self.num_layers, size = self.tower.num_layers, self.tower.config.hidden_size
        self.merge_size, self.feature_size = fields.integer("spatial_merge_size", 2), text.integer("hidden_size")
        self.norm = RMSNorm(size, text.number("rms_norm_eps", 1e-6))
        self.merger = LinearLayer(size * self.merge_size**2, size, bias=False)
        self.projector = Projector(
            size,
            self.feature_size,
            self.feature_size,
            activation=vision_activation(fields, "projector_hidden_act"),
            bias=fields.flag("multimodal_projector_bias", default=False),
        )

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: pixel_values [1, C, H, W], of which image_sizes [1, 2] is the image."""
        height, width = host_integers(inputs["image_sizes"])[:2]
        images = inputs["pixel_values"].flatten(0, -4)[:, :, :height, :width]
        rows, columns = (pixels // self.tower.patch_size for pixels in images.shape[2:])
        (hidden_TD,) = self.tower(images, [self.num_layers])
        squares = merge_neighbours(self.norm(hidden_TD), rows, columns, self.merge_size)
        # The merging weight goes through the patches of a square for each element.
        by_element = squares.view(len(squares), self.merge_size**2, -1).transpose(1, 2).flatten(1)
        return self.projector(self.merger(by_element, NO_CONTEXT))  # type: ignore[no-any-return]

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: an image nearly as wide as high."""
        images = self.tower.patch_embedding.zeros(1, *(self.merge_size * side for side in near_square(most_rows)))
        return DummyItem("image", {"pixel_values": images, "image_sizes": np.array([images.shape[2:]])})
