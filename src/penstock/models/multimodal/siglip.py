"""SigLIP (Zhai et al. 2023, https://arxiv.org/abs/2303.15343) as the vision tower of several families; the encoders of
Idefics3 (Laurençon et al. 2024, https://arxiv.org/abs/2408.12637), SmolVLM (https://arxiv.org/abs/2504.05299) and
Gemma 3 (https://arxiv.org/abs/2503.19786).

Suffixes: N images or tiles, S patches of each, T patches of all, L tokens of an item, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import LinearLayer
from penstock.layers.norm import RMSNormRoundedLast
from penstock.layers.weights import WeightSlot
from penstock.models.config_fields import Fields
from penstock.models.multimodal.interface import DummyItem
from penstock.models.multimodal.vision_layers import (
    PROJECTOR,
    TOWER,
    PatchEmbedding,
    Segments,
    TableEncoder,
    TowerEncoder,
    VisionLayerConfig,
    VisionLayers,
    check_squares,
    does_not_fit,
    encoder_fields,
    in_parts,
    merge_neighbours,
    square,
)
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState


class SiglipTower(nn.Module):
    """Patches, positions and layers of SigLIP, without the last norm. num_layers: the first ones; None for all."""

    num_leading_tokens: ClassVar[int] = 0
    has_patch_bias: ClassVar[bool] = True

    def __init__(self, fields: Fields, num_layers: int | None = None) -> None:
        super().__init__()
        self.config = config = VisionLayerConfig.read(fields)
        self.patch_size, self.side = square(fields, "patch_size"), square(fields, "image_size")
        self.side //= self.patch_size
        self.num_layers = fields.integer("num_hidden_layers") if num_layers is None else num_layers
        kernel, size = [self.patch_size] * 2, config.hidden_size
        self.patch_embedding = PatchEmbedding(fields.integer("num_channels", 3), kernel, size, bias=self.has_patch_bias)
        num_positions = self.num_leading_tokens + self.side**2
        self.position_embeddings = VocabEmbedding(num_positions, size, parallel=ParallelState())
        self.layers = VisionLayers(config, self.num_layers)

    def forward(self, images_NCHW: Tensor, wanted: Sequence[int]) -> list[Tensor]:
        """Hidden states [T, D] of images of the model's size, after these numbers of layers, ascending."""
        check_squares(images_NCHW, self.side, self.patch_size)
        positions = torch.arange(self.num_leading_tokens + self.side**2, device=images_NCHW.device)
        return self.states(images_NCHW, positions, wanted)

    def states(
        self,
        images_NCHW: Tensor,
        positions: Tensor,
        wanted: Sequence[int],
        is_visible_NS: Tensor | None = None,
    ) -> list[Tensor]:
        """Hidden states as of `forward`. positions: [S] or [N, S], rows of the table. is_visible_NS: see `Segments`."""
        num_images = len(images_NCHW)
        hidden_NSD = self.add_leading(self.patch_embedding.embed_images(images_NCHW).unflatten(0, (num_images, -1)))
        positions_D = self.position_embeddings(positions.flatten(), NO_CONTEXT).view(*positions.shape, -1)
        hidden_TD = self.norm_of_input((hidden_NSD + positions_D).flatten(0, 1))
        segments = Segments(np.full(num_images, hidden_NSD.shape[1]), hidden_TD.device, is_visible_NS)
        return self.layers(hidden_TD, None, segments, wanted)  # type: ignore[no-any-return]

    def add_leading(self, patches_NSD: Tensor) -> Tensor:
        """Put the leading tokens before an image's patches."""
        return patches_NSD

    def norm_of_input(self, hidden_TD: Tensor) -> Tensor:
        """The norm before the first layer."""
        return hidden_TD

    @staticmethod
    def table(prefix: str) -> WeightTable:
        """The tower's tensors, as the submodule `tower` of an encoder. prefix: of their names."""
        layer = f"{prefix}encoder.layers.*"
        return {
            f"{prefix}embeddings.patch_embedding": Into("tower.patch_embedding"),
            f"{prefix}embeddings.position_embedding": Into("tower.position_embeddings"),
            f"{layer}.self_attn.q_proj": Into("tower.layers.*.attention.qkv_proj", shard="q"),
            f"{layer}.self_attn.k_proj": Into("tower.layers.*.attention.qkv_proj", shard="k"),
            f"{layer}.self_attn.v_proj": Into("tower.layers.*.attention.qkv_proj", shard="v"),
            f"{layer}.self_attn.out_proj": Into("tower.layers.*.attention.o_proj"),
            f"{layer}.layer_norm1": Into("tower.layers.*.attention_norm"),
            f"{layer}.layer_norm2": Into("tower.layers.*.mlp_norm"),
            f"{layer}.mlp.fc1": Into("tower.layers.*.mlp.up_proj"),
            f"{layer}.mlp.fc2": Into("tower.layers.*.mlp.down_proj"),
        }


_IDEFICS3: WeightTable = {
    **SiglipTower.table("model.vision_model."),
    "model.vision_model.post_layernorm": Into("last_norm"),
    "model.connector.modality_projection.proj": Into("projection"),
}
_GEMMA3: WeightTable = {
    **SiglipTower.table(TOWER),
    f"{TOWER}post_layernorm": Into("last_norm"),
    PROJECTOR.rstrip("."): Into("projection"),
    f"{PROJECTOR}mm_soft_emb_norm": Into("norm"),
}


class Idefics3Vision(TableEncoder):
    """The encoder of Idefics3: tiles of any size, whose positions are fractions of the table's sides."""

    table = _IDEFICS3
    renames: ClassVar[Mapping[str, str]] = {"vision_model.": "model.vision_model.", "connector.": "model.connector."}
    own: ClassVar[tuple[str, ...]] = ("model.vision_model.", "model.connector.")

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        fields = encoder_fields(hf_config)
        self.tower = SiglipTower(fields.section("vision_config"))
        self.num_layers, size = self.tower.num_layers, self.tower.config.hidden_size
        self.last_norm = self.tower.config.norm()
        self._scale = fields.integer("scale_factor", 2)
        self.feature_size = fields.section("text_config").integer("hidden_size")
        self.projection = LinearLayer(size * self._scale**2, self.feature_size, bias=False)

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: pixel_values [1, N, C, H, W], and pixel_attention_mask [1, N, H, W] or none."""
        images = inputs["pixel_values"].flatten(0, -4)
        rows, columns = (pixels // self.tower.patch_size for pixels in images.shape[2:])
        if rows != columns or rows == 0 or rows % self._scale != 0:
            size, squares = self.tower.patch_size, f"squares with multiples of {self._scale} patches"
            tiles = f"tiles of {images.shape[2]} x {images.shape[3]} pixels"
            raise does_not_fit(tiles, f"{squares} of {size} pixels")
        is_visible = self._visible_patches(inputs.get("pixel_attention_mask"))
        if is_visible is not None:
            return self._encode(images, self._positions(is_visible), is_visible.flatten(1).to(images.device))
        (positions,) = self._positions(torch.ones(1, rows, columns, dtype=torch.bool, device="cpu"))
        return in_parts(images, 1, rows * columns, lambda part: self._encode(part, positions))

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: an image of tiles of the table's size."""
        side = self.tower.side
        images = self.tower.patch_embedding.zeros(most_rows // (side // self._scale) ** 2, side, side)
        return DummyItem("image", {"pixel_values": images[None]})

    def _encode(self, images_NCHW: Tensor, positions: Tensor, is_visible_NS: Tensor | None = None) -> Tensor:
        positions = positions.to(images_NCHW.device)
        (hidden_TD,) = self.tower.states(images_NCHW, positions, [self.num_layers], is_visible_NS)
        side = images_NCHW.shape[2] // self.tower.patch_size
        merged = merge_neighbours(self.last_norm(hidden_TD), side, side, self._scale)
        return self.projection(merged, NO_CONTEXT)  # type: ignore[no-any-return]

    def _visible_patches(self, mask: Tensor | None) -> Tensor | None:
        """Whether patches have pixels of the image, [N, rows, columns] on the host; None where all have."""
        if mask is None or mask.numpy().all():
            return None
        size = self.tower.patch_size
        is_pixel = mask.flatten(0, -3).bool()
        is_visible: Tensor = is_pixel.unfold(1, size, size).unfold(2, size, size).flatten(3).any(-1)
        return is_visible

    def _positions(self, is_visible: Tensor) -> Tensor:
        """Row of the position table of each patch, [N, rows * columns] on the host; 0 for those without pixels."""
        side = self.tower.side
        # The same operations in float32 as the model was trained with: fractions meet the boundaries exactly.
        boundaries = torch.arange(1 / side, 1.0, 1 / side, device="cpu")
        places = []
        for is_used in (is_visible[:, :, 0], is_visible[:, 0, :]):
            index = torch.arange(is_used.shape[1], dtype=torch.float32, device="cpu")
            fractions = index * (1.0 / is_used.sum(1))[:, None]
            places.append(torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True))
        positions = places[0][:, :, None] * side + places[1][:, None]
        return torch.where(is_visible, positions, 0).flatten(1)


class SmolVLMVision(Idefics3Vision):
    """The encoder of SmolVLM. The frames of a video are tiles."""

    modalities = ("image", "video")


class InputProjection(LinearLayer):
    """A projection whose weight is stored as [inputs, outputs], without a name of its own."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__(input_size, output_size, bias=False)

    def slots(self) -> dict[str, WeightSlot]:
        return {"mm_input_projection_weight": WeightSlot((self.input_size, self.output_size), self.weight.t())}


class Gemma3Vision(TowerEncoder):
    """The encoder of Gemma 3: SigLIP, and means of squares of patches, normalised and projected."""

    table = _GEMMA3
    ignorable = (r"model\.vision_tower\.head\..*", r"model\.vision_tower\.embeddings\.position_ids")

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        fields = encoder_fields(hf_config)
        self.tower = SiglipTower(fields.section("vision_config"))
        config, self.num_layers = self.tower.config, self.tower.num_layers
        self.last_norm = config.norm()
        num_tokens = fields.integer("mm_tokens_per_image", 256)
        self._pool = self.tower.side // int(num_tokens**0.5)
        if self._pool == 0:
            raise fields.unsupported("mm_tokens_per_image", num_tokens, f"at most {self.tower.side**2} patches")
        self.norm = RMSNormRoundedLast(config.hidden_size, config.norm_eps, weight_offset=1.0)
        self.feature_size = fields.section("text_config").integer("hidden_size")
        self.projection = InputProjection(config.hidden_size, self.feature_size)

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: pixel_values [N, C, H, W], the image and its crops."""
        images = inputs["pixel_values"].flatten(0, -4)
        return in_parts(images, 1, self.tower.side**2, self._encode)

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: an image and its crops."""
        side = self.tower.side
        images = self.tower.patch_embedding.zeros(most_rows // (side // self._pool) ** 2, side, side)
        return DummyItem("image", {"pixel_values": images})

    def _encode(self, images_NCHW: Tensor) -> Tensor:
        (hidden_TD,) = self.tower(images_NCHW, [self.num_layers])
        side = self.tower.side
        squares = merge_neighbours(self.last_norm(hidden_TD), side, side, self._pool)
        means_LD = squares.view(len(squares), self._pool**2, -1).mean(1)
        return self.projection(self.norm(means_LD), NO_CONTEXT)  # type: ignore[no-any-return]
