"""Encoder of InternVL (Chen et al. 2023, https://arxiv.org/abs/2312.14238), as Transformers has it.

Suffixes: N images, tiles or frames, T tokens of all, L tokens of an item, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.layers.norm import LayerNorm
from penstock.layers.weights import new_parameter
from penstock.models.multimodal.interface import DummyItem
from penstock.models.multimodal.vision_layers import (
    PROJECTOR,
    PROJECTOR_TABLE,
    TOWER,
    PatchEmbedding,
    Projector,
    Segments,
    TowerEncoder,
    VisionLayerConfig,
    VisionLayers,
    check_squares,
    encoder_fields,
    feature_layers,
    in_parts,
    merge_neighbours,
    square,
    vision_activation,
)
from penstock.models.weights import Into, WeightTable

_LAYER = f"{TOWER}encoder.layer.*"
_TABLE: WeightTable = {
    f"{TOWER}embeddings": Into("embeddings"),
    f"{TOWER}embeddings.patch_embeddings.projection": Into("patch_embedding"),
    _LAYER: Into("layers.*.scales"),
    f"{_LAYER}.layernorm_before": Into("layers.*.attention_norm"),
    f"{_LAYER}.attention.q_proj": Into("layers.*.attention.qkv_proj", shard="q"),
    f"{_LAYER}.attention.k_proj": Into("layers.*.attention.qkv_proj", shard="k"),
    f"{_LAYER}.attention.v_proj": Into("layers.*.attention.qkv_proj", shard="v"),
    f"{_LAYER}.attention.projection_layer": Into("layers.*.attention.o_proj"),
    f"{_LAYER}.layernorm_after": Into("layers.*.mlp_norm"),
    f"{_LAYER}.mlp.fc1": Into("layers.*.mlp.up_proj"),
    f"{_LAYER}.mlp.fc2": Into("layers.*.mlp.down_proj"),
    **PROJECTOR_TABLE,
    f"{PROJECTOR}layer_norm": Into("projector_norm"),
}
_QUERY_KEY_NORMS: WeightTable = {
    f"{_LAYER}.attention.q_norm": Into("layers.*.attention.norm.q_norm"),
    f"{_LAYER}.attention.k_norm": Into("layers.*.attention.norm.k_norm"),
}
_LAST_NORM: WeightTable = {f"{TOWER}layernorm": Into("last_norm")}
# Norms by the names that `config.json` has for them.
_NORMS = ("layer_norm", "rms_norm")
_PROJECTOR_EPS = 1e-5


class Embeddings(nn.Module):
    """The token before an image's patches, and the positions of both, if there are any."""

    def __init__(self, num_positions: int, size: int, *, has_positions: bool) -> None:
        super().__init__()
        self.cls_token = new_parameter(1, 1, size)
        self.position_embeddings = new_parameter(1, num_positions, size) if has_positions else None

    def forward(self, patches_NSD: Tensor) -> Tensor:
        hidden = torch.cat((self.cls_token.expand(len(patches_NSD), 1, -1), patches_NSD), dim=1)
        return hidden if self.position_embeddings is None else hidden + self.position_embeddings


class InternVision(TowerEncoder):
    """The encoder of InternVL: tiles, whose squares of patches are concatenated and projected."""

    modalities = ("image", "video")

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        fields = encoder_fields(hf_config)
        vision = fields.section("vision_config")
        num_layers = vision.integer("num_hidden_layers")
        has_query_key_norm = vision.flag("use_qk_norm", default=False)
        config = VisionLayerConfig.read(
            vision,
            has_rms_norm=vision.choice("norm_type", _NORMS, default=_NORMS[0]) == "rms_norm",
            qkv_bias=vision.flag("attention_bias", default=False),
            has_query_key_norm=has_query_key_norm,
            has_scales=True,
        )
        layers, size = feature_layers(fields, num_layers, -1), config.hidden_size
        if len(layers) != 1:
            raise fields.unsupported("vision_feature_layer", fields.hf_config["vision_feature_layer"], "one integer")
        self.num_layers = layers[0]
        # Hidden states of the last layer are normalised if they are asked for as -1.
        is_last = fields.hf_config.get("vision_feature_layer", -1) == -1
        has_last_norm = not vision.flag("use_mean_pooling", default=True)
        # Squares are of patches alone.
        fields.choice("vision_feature_select_strategy", ("default",), default="default")
        self.patch_size = square(vision, "patch_size")
        self.side = square(vision, "image_size") // self.patch_size
        self._scale = int(1 / fields.number("downsample_ratio", 0.5))
        if self._scale == 0 or self.side % self._scale != 0:
            ratio = fields.hf_config["downsample_ratio"]
            raise fields.unsupported("downsample_ratio", ratio, f"1 / a divisor of {self.side} patches")
        channels = vision.integer("num_channels", 3)
        self.patch_embedding = PatchEmbedding(channels, [self.patch_size] * 2, size, bias=True)
        has_positions = vision.flag("use_absolute_position_embeddings", default=True)
        self.embeddings = Embeddings(self.side**2 + 1, size, has_positions=has_positions)
        self.layers = VisionLayers(config, self.num_layers)
        self.last_norm = LayerNorm(size, config.norm_eps) if has_last_norm and is_last else None
        self.projector_norm = LayerNorm(size * self._scale**2, _PROJECTOR_EPS)
        self.feature_size = fields.section("text_config").integer("hidden_size")
        self.projector = Projector(
            size * self._scale**2,
            self.feature_size,
            self.feature_size,
            activation=vision_activation(fields, "projector_hidden_act"),
        )
        norms = _QUERY_KEY_NORMS if has_query_key_norm else {}
        self.table = {**_TABLE, **norms, **(_LAST_NORM if self.last_norm else {})}
        unused = "|".join(str(layer) for layer in range(self.num_layers, num_layers)) or "none"
        self.ignorable = (
            rf"{TOWER}embeddings\.mask_token",
            rf"{TOWER}encoder\.layer\.({unused})\..*",
            rf"{TOWER}layernorm\..*",
        )

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: pixel_values [N, C, H, W], tiles of an image or frames of a video."""
        images = inputs["pixel_values"].flatten(0, -4)
        check_squares(images, self.side, self.patch_size)
        return in_parts(images, 1, self.side**2, self._encode)

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: an image of tiles."""
        num_tiles = most_rows // (self.side // self._scale) ** 2
        return DummyItem("image", {"pixel_values": self.patch_embedding.zeros(num_tiles, self.side, self.side)})

    def _encode(self, images_NCHW: Tensor) -> Tensor:
        hidden_NSD = self.embeddings(
            self.patch_embedding.embed_images(images_NCHW).unflatten(0, (len(images_NCHW), -1))
        )
        segments = Segments.equal(len(images_NCHW), hidden_NSD.shape[1], images_NCHW.device)
        (hidden_TD,) = self.layers(hidden_NSD.flatten(0, 1), None, segments, [self.num_layers])
        if self.last_norm is not None:
            hidden_TD = self.last_norm(hidden_TD)
        patches_NSD = hidden_TD.unflatten(0, (len(images_NCHW), -1))[:, 1:]
        merged = merge_neighbours(patches_NSD.flatten(0, 1), self.side, self.side, self._scale)
        return self.projector(self.projector_norm(merged))  # type: ignore[no-any-return]
