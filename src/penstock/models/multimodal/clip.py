"""Encoders of LLaVA 1.5 (Liu et al. 2023, https://arxiv.org/abs/2310.03744), on CLIP (Radford et al. 2021,
https://arxiv.org/abs/2103.00020) or another tower; LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next);
and LLaVA-OneVision (Li et al. 2024, https://arxiv.org/abs/2408.03326), on SigLIP.

Suffixes: N images or tiles, S tokens of each, T tokens of all, L tokens of an item, D hidden size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layers.weights import new_parameter
from penstock.models.config_fields import Fields
from penstock.models.multimodal.interface import DummyItem
from penstock.models.multimodal.pixtral import PixtralTower
from penstock.models.multimodal.siglip import SiglipTower
from penstock.models.multimodal.vision_layers import (
    PROJECTOR_TABLE,
    TOWER,
    Projector,
    TowerEncoder,
    encoder_fields,
    feature_layers,
    host_integers,
    in_parts,
    near_square,
    vision_activation,
)
from penstock.models.weights import Into, WeightTable


class ClassToken(nn.Module):
    """The token before an image's patches."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.class_embedding = new_parameter(size)


class ClipTower(SiglipTower):
    """Patches behind a class token, positions, a norm, and layers of CLIP."""

    num_leading_tokens = 1
    has_patch_bias = False

    def __init__(self, fields: Fields, num_layers: int | None = None) -> None:
        super().__init__(fields, num_layers)
        self.class_token, self.first_norm = ClassToken(self.config.hidden_size), self.config.norm()

    def add_leading(self, patches_NSD: Tensor) -> Tensor:
        token_N1D = self.class_token.class_embedding.expand(len(patches_NSD), 1, -1)
        return torch.cat((token_N1D, patches_NSD), dim=1)

    def norm_of_input(self, hidden_TD: Tensor) -> Tensor:
        return self.first_norm(hidden_TD)  # type: ignore[no-any-return]

    @staticmethod
    def table(prefix: str) -> WeightTable:
        return {
            **SiglipTower.table(prefix),
            f"{prefix}embeddings": Into("tower.class_token"),
            f"{prefix}pre_layrnorm": Into("tower.first_norm"),
        }


# By the model type of the vision configuration.
_TOWERS: Mapping[str, type[SiglipTower] | type[PixtralTower]] = {
    "clip_vision_model": ClipTower,
    "siglip_vision_model": SiglipTower,
    "pixtral": PixtralTower,
}


def llava_vision(hf_config: Mapping[str, Any]) -> LlavaVision | None:
    """The encoder of LLaVA; None with a tower that has no native implementation."""
    return LlavaVision(hf_config) if hf_config["vision_config"].get("model_type") in _TOWERS else None


def llava_next(hf_config: Mapping[str, Any]) -> LlavaNext | None:
    """The encoder of LLaVA-NeXT; None with another tower than CLIP or SigLIP."""
    is_known = hf_config["vision_config"].get("model_type") in ("clip_vision_model", "siglip_vision_model")
    return LlavaNext(hf_config) if is_known else None


def onevision(hf_config: Mapping[str, Any]) -> OneVision | None:
    """The encoder of LLaVA-OneVision; None with another tower than SigLIP."""
    return OneVision(hf_config) if hf_config["vision_config"].get("model_type") == "siglip_vision_model" else None


class LlavaVision(TowerEncoder):
    """Outputs of some layers of a tower, side by side, and a projector. Later layers are not loaded."""

    default_layer: ClassVar[int] = -2
    default_strategy: ClassVar[str] = "default"

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        fields = encoder_fields(hf_config)
        vision = fields.section("vision_config")
        tower, num_layers = _TOWERS[vision.hf_config["model_type"]], vision.integer("num_hidden_layers")
        self._features = feature_layers(fields, num_layers, self.default_layer)
        self.num_layers = max(self._features)
        self.tower: SiglipTower | PixtralTower = tower(vision, self.num_layers)
        strategy = fields.choice("vision_feature_select_strategy", ("default", "full"), default=self.default_strategy)
        self._num_dropped = 1 if strategy == "default" else 0
        self.feature_size = size = fields.section("text_config").integer("hidden_size")
        self.projector = Projector(
            self.tower.config.hidden_size * len(self._features),
            size,
            size,
            activation=vision_activation(fields, "projector_hidden_act"),
            bias=fields.flag("multimodal_projector_bias", default=True),
        )
        self.table = {**tower.table(TOWER), **PROJECTOR_TABLE}
        unused = "|".join(str(layer) for layer in range(self.num_layers, num_layers)) or "none"
        self.ignorable = (
            rf"{re.escape(TOWER)}(encoder|transformer)\.layers\.({unused})\..*",
            rf"{re.escape(TOWER)}(post_layernorm\..*|head\..*|embeddings\.position_ids)",
        )

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: pixel_values [1, C, H, W]; with Pixtral's tower, image_sizes [1, 2] too, or none."""
        images, sizes = inputs["pixel_values"].flatten(0, -4), inputs.get("image_sizes")
        if sizes is not None and isinstance(self.tower, PixtralTower):
            height, width = host_integers(sizes)[:2]
            images = images[:, :, :height, :width]
        return self.features(images).flatten(0, 1)

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: one image, with Pixtral's tower one nearly as wide as high."""
        tower = self.tower
        rows, columns = near_square(most_rows) if isinstance(tower, PixtralTower) else (tower.side, tower.side)
        return DummyItem("image", {"pixel_values": tower.patch_embedding.zeros(1, rows, columns)})

    def features(self, images_NCHW: Tensor) -> Tensor:
        """Projected features, [N, S, D]."""
        tokens = math.prod(pixels // self.tower.patch_size for pixels in images_NCHW.shape[2:])
        return in_parts(images_NCHW, 1, max(1, tokens), self._features_at_once)

    def _features_at_once(self, images_NCHW: Tensor) -> Tensor:
        wanted = sorted(set(self._features))
        states = dict(zip(wanted, self.tower(images_NCHW, wanted), strict=True))
        chosen_TX = torch.cat([states[layer] for layer in self._features], dim=-1)
        chosen_NSX: Tensor = chosen_TX.unflatten(0, (len(images_NCHW), -1))[:, self._num_dropped :]
        num_tokens = chosen_NSX.shape[1]
        projected_TD: Tensor = self.projector(chosen_NSX.flatten(0, 1))
        return projected_TD.view(-1, num_tokens, self.feature_size)


class Newline(nn.Module):
    """The embedding behind each row of an image."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.image_newline = new_parameter(size)


class LlavaNext(LlavaVision):
    """The encoder of LLaVA-NeXT: an image whole, and its tiles as one grid without their padding."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__(hf_config)
        fields = encoder_fields(hf_config)
        self.newline = Newline(self.feature_size)
        self.table = {**self.table, "model": Into("newline")}
        assert isinstance(self.tower, SiglipTower), "llava_next() and onevision() make no other"
        self._side, self._tile_size = self.tower.side, self.tower.side * self.tower.patch_size
        self._pinpoints = np.array(hf_config["image_grid_pinpoints"])
        if self._pinpoints.ndim != 2 or self._pinpoints.shape[1] != 2:
            raise fields.unsupported("image_grid_pinpoints", hf_config["image_grid_pinpoints"], "pairs of sizes")

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: pixel_values [1, tiles, C, H, W] and image_sizes [1, 2]."""
        images, size = inputs["pixel_values"].flatten(0, -4), host_integers(inputs["image_sizes"])[:2]
        shape = self._shape_of_tiles(size)
        features_NSD = self.features(images[: 1 + shape[0] * shape[1]])
        grid = self._limited(self._without_padding(self._grid(features_NSD[1:], shape), size))
        newlines = self.newline.image_newline.expand(len(grid), 1, -1)
        return torch.cat((features_NSD[0], torch.cat((grid, newlines), dim=1).flatten(0, 1)))

    def _limited(self, grid: Tensor) -> Tensor:
        """Shrink a grid with more features than the limit."""
        return grid

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: an image of as many tiles as allowed."""
        sizes = sorted(self._pinpoints.tolist(), key=math.prod)
        size = next((size for size in reversed(sizes) if self._num_rows(size) <= most_rows), sizes[0])
        num_tiles = 1 + math.prod(size) // self._tile_size**2
        images = self.tower.patch_embedding.zeros(num_tiles, self._side, self._side)
        return DummyItem("image", {"pixel_values": images[None], "image_sizes": np.array([size])})

    def _num_rows(self, size: list[int]) -> int:
        """Rows of an image whose tiles have no padding."""
        grid = torch.empty(*(pixels // self.tower.patch_size for pixels in size), 1, device="meta")
        rows, columns = self._limited(self._without_padding(grid, size)).shape[:2]
        return int(self._side**2 + rows * (columns + 1))

    def _shape_of_tiles(self, size: list[int]) -> tuple[int, int]:
        """Rows and columns of tiles: those that keep most of an image of this height and width, and waste least."""
        height, width = size
        heights, widths = self._pinpoints.T
        scale = np.minimum(widths / width, heights / height)
        kept = np.minimum((width * scale).astype(int) * (height * scale).astype(int), width * height)
        best = self._pinpoints[np.lexsort((heights * widths - kept, -kept))[0]]
        rows, columns = best // self._tile_size
        return int(rows), int(columns)

    def _grid(self, tiles_NSD: Tensor, shape: tuple[int, int]) -> Tensor:
        """Features of tiles as one image, [rows, columns, D]."""
        side = self._side
        return tiles_NSD.view(*shape, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _without_padding(self, grid: Tensor, size: list[int]) -> Tensor:
        """Cut what the tiles have beyond an image of this height and width."""
        rows, columns = grid.shape[:2]
        height, width = size
        if width / height > columns / rows:
            padding = (rows - int(round(height * (columns / width), 7))) // 2
            grid = grid[padding : rows - padding]
        else:
            padding = (columns - int(round(width * (rows / height), 7))) // 2
            grid = grid[:, padding : columns - padding]
        return grid


class OneVision(LlavaNext):
    """The encoder of LLaVA-OneVision: as that of LLaVA-NeXT, with a limit of features; and videos."""

    modalities = ("image", "video")
    default_layer = -1
    default_strategy = "full"

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__(hf_config)
        ratio = hf_config.get("vision_aspect_ratio") or "anyres_max_9"
        match = re.fullmatch(r"anyres_max_(\d+)", ratio)
        if match is None:
            raise encoder_fields(hf_config).unsupported("vision_aspect_ratio", ratio, "anyres_max_ and a number")
        self._most_tiles = int(match[1])

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: pixel_values [1, tiles, C, H, W] and image_sizes [1, 2], or pixel_values_videos.

        batch_num_images, if there, is the number of images in the prompt: tiles are of one alone.
        """
        newline_1D = self.newline.image_newline[None]
        if modality == "video":
            features_NSD = self.features(inputs["pixel_values_videos"].flatten(0, -4))
            return torch.cat((self._halved(features_NSD), newline_1D))
        num_images = inputs.get("batch_num_images")
        if num_images is not None and host_integers(num_images)[0] != 1:
            return torch.cat((self.features(inputs["pixel_values"].flatten(0, -4)[:1])[0], newline_1D))
        return super().encode(modality, inputs)

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: an image of as many tiles as allowed, or a video of frames."""
        image, side = super().dummy_item(most_rows), self._side
        num_frames = max(1, (most_rows - 1) // math.ceil(side / 2) ** 2)
        is_small = self._num_rows(image.inputs["image_sizes"][0].tolist()) > most_rows
        if not is_small and image.inputs["pixel_values"].shape[1] > num_frames:
            return image
        frames = self.tower.patch_embedding.zeros(num_frames, side, side)
        return DummyItem("video", {"pixel_values_videos": frames[None]})

    def _limited(self, grid: Tensor) -> Tensor:
        rows, columns = grid.shape[:2]
        ratio = math.sqrt(rows * columns / (self._most_tiles * self._side**2))
        return grid if ratio <= 1.1 else _resized(grid[None], int(rows // ratio), int(columns // ratio))[0]

    def _halved(self, frames_NSD: Tensor) -> Tensor:
        """Frames of half the size, one after the other: [L, D]."""
        side = self._side
        half = math.ceil(side / 2)
        return _resized(frames_NSD.unflatten(1, (side, side)), half, half).flatten(0, 2)


def _resized(grids: Tensor, rows: int, columns: int) -> Tensor:
    """Bilinear interpolation of [N, rows, columns, D]."""
    return F.interpolate(grids.permute(0, 3, 1, 2), (rows, columns), mode="bilinear").permute(0, 2, 3, 1)
