"""Vision encoders of Qwen2-VL (Wang et al. 2024, https://arxiv.org/abs/2409.12191), Qwen2.5-VL (Bai et al. 2025,
https://arxiv.org/abs/2502.13923), Qwen3-VL (https://arxiv.org/abs/2511.21631) and Qwen3.5.

Patches come in groups that are merged into one token: merge_size rows by merge_size columns. Each frame attends to
itself; most layers of Qwen2.5-VL attend within windows of a frame.
Suffixes: T patches of an item, L tokens of an item, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT
from penstock.layers.embedding import VocabEmbedding
from penstock.models.config_fields import Fields
from penstock.models.multimodal.interface import DummyItem
from penstock.models.multimodal.vision_layers import (
    AxialRotary,
    PatchEmbedding,
    Projector,
    Segments,
    TableEncoder,
    VisionLayerConfig,
    VisionLayers,
    does_not_fit,
    encoder_fields,
    host_integers,
    in_parts,
    near_square,
    rope_theta,
    square,
)
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_PREFIX = "model.visual."
_NORM_EPS = 1e-6
_COMMON: WeightTable = {
    f"{_PREFIX}patch_embed.proj": Into("patch_embedding"),
    f"{_PREFIX}blocks.*.norm1": Into("layers.*.attention_norm"),
    f"{_PREFIX}blocks.*.attn.qkv": Into("layers.*.attention.qkv_proj"),
    f"{_PREFIX}blocks.*.attn.proj": Into("layers.*.attention.o_proj"),
    f"{_PREFIX}blocks.*.norm2": Into("layers.*.mlp_norm"),
}
_MERGER: WeightTable = {
    f"{_PREFIX}merger.ln_q": Into("merger.norm"),
    f"{_PREFIX}merger.mlp.0": Into("merger.projector.linear_1"),
    f"{_PREFIX}merger.mlp.2": Into("merger.projector.linear_2"),
}
_PLAIN: WeightTable = {
    **_COMMON,
    **_MERGER,
    f"{_PREFIX}blocks.*.mlp.fc1": Into("layers.*.mlp.up_proj"),
    f"{_PREFIX}blocks.*.mlp.fc2": Into("layers.*.mlp.down_proj"),
}
_GATED: WeightTable = {
    **_COMMON,
    **_MERGER,
    f"{_PREFIX}blocks.*.mlp.gate_proj": Into("layers.*.mlp.gate_up_proj", shard="gate"),
    f"{_PREFIX}blocks.*.mlp.up_proj": Into("layers.*.mlp.gate_up_proj", shard="up"),
    f"{_PREFIX}blocks.*.mlp.down_proj": Into("layers.*.mlp.down_proj"),
}
_DEEPSTACK: WeightTable = {
    **_COMMON,
    f"{_PREFIX}blocks.*.mlp.linear_fc1": Into("layers.*.mlp.up_proj"),
    f"{_PREFIX}blocks.*.mlp.linear_fc2": Into("layers.*.mlp.down_proj"),
    f"{_PREFIX}pos_embed": Into("position_embeddings"),
    f"{_PREFIX}merger.norm": Into("merger.norm"),
    f"{_PREFIX}merger.linear_fc1": Into("merger.projector.linear_1"),
    f"{_PREFIX}merger.linear_fc2": Into("merger.projector.linear_2"),
}


class Grid:
    """Patches of an item: frames of rows and columns, in the order of the patches, merged groups together."""

    def __init__(self, frames: int, rows: int, columns: int, merge_size: int, device: torch.device) -> None:
        self.frames, self.rows, self.columns, self.device = frames, rows, columns, device
        self.merged_rows, self.merged_columns = rows // merge_size, columns // merge_size
        raster = torch.arange(rows * columns, device=device)
        sides = self.merged_rows, merge_size, self.merged_columns, merge_size
        self.raster_T = raster.view(sides).transpose(1, 2).flatten()

    @property
    def of_frame(self) -> tuple[Tensor, Tensor]:
        """Row and column of each patch of a frame, int64."""
        return self.raster_T // self.columns, self.raster_T % self.columns

    @property
    def coordinates(self) -> tuple[Tensor, Tensor]:
        """Row and column of each patch, [T] each."""
        rows, columns = self.of_frame
        return rows.repeat(self.frames), columns.repeat(self.frames)

    def windows(self, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens in the order of their windows of side * side tokens, cut at the frame's edges, and the windows' sizes.

        Windows go row by row, and their tokens too.
        """
        shape = self.frames, self.merged_rows, self.merged_columns
        frame, row, column = np.indices(shape).reshape(3, -1)
        windows = np.stack((frame, row // side, column // side))
        order = np.lexsort((column, row, *windows[::-1]))
        window = np.ravel_multi_index(tuple(windows), (shape[0], -(-shape[1] // side), -(-shape[2] // side)))
        return order, np.bincount(window)


def _layers(fields: Fields, name: str) -> list[int]:
    """A list of indices of layers. Raises UnsupportedFeature for another value."""
    value = fields.hf_config.get(name)
    if not isinstance(value, list | tuple) or not all(isinstance(layer, int) and layer >= 0 for layer in value):
        raise fields.unsupported(name, value, "a list of indices of layers")
    return list(value)


class PatchMerger(nn.Module):
    """Projection of merged patches. norms_merged: whether the norm is over merged patches."""

    def __init__(
        self, config: VisionLayerConfig, merge_size: int, output_size: int, *, norms_merged: bool = False
    ) -> None:
        super().__init__()
        self._width = config.hidden_size * merge_size**2
        self.norm = config.norm(self._width if norms_merged else None)
        self.projector = Projector(self._width, self._width, output_size, activation="gelu")
        self._norms_merged = norms_merged

    def forward(self, hidden_TD: Tensor) -> Tensor:
        if self._norms_merged:
            return self.projector(self.norm(hidden_TD.view(-1, self._width)))  # type: ignore[no-any-return]
        return self.projector(self.norm(hidden_TD).view(-1, self._width))  # type: ignore[no-any-return]


class QwenVision(TableEncoder):
    """Base of the encoders: patches, layers and the merger."""

    modalities = ("image", "video")
    renames: ClassVar[Mapping[str, str]] = {"visual.": _PREFIX}
    own: ClassVar[tuple[str, ...]] = (_PREFIX,)
    has_patch_bias: ClassVar[bool] = False

    def __init__(self, fields: Fields, config: VisionLayerConfig, output_size: int) -> None:
        super().__init__()
        self.num_layers, self.feature_size = fields.integer("depth"), output_size
        self.merge_size = fields.integer("spatial_merge_size")
        kernel = square(fields, "temporal_patch_size"), *[square(fields, "patch_size")] * 2
        channels = fields.integer("in_channels", default=3)
        self.patch_embedding = PatchEmbedding(channels, kernel, config.hidden_size, bias=self.has_patch_bias)
        if config.head_size % 4 != 0:
            raise fields.unsupported("hidden_size", config.hidden_size, f"multiples of 4 * {config.num_heads} heads")
        self.rotary = AxialRotary.of(config.head_size, rope_theta(fields))
        self.layers = VisionLayers(config, self.num_layers)
        self.merger = PatchMerger(config, self.merge_size, output_size)

    def encode(self, modality: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `MediaEncoder`: pixel_values and image_grid_thw, or pixel_values_videos and video_grid_thw."""
        pixels = inputs["pixel_values" if modality == "image" else "pixel_values_videos"]
        frames, rows, columns = host_integers(inputs[f"{modality}_grid_thw"])[:3]
        pixels = pixels.reshape(-1, self.patch_embedding.input_size)
        if frames * rows * columns != len(pixels):
            raise does_not_fit(f"{len(pixels)} patches", f"{frames} x {rows} x {columns} for such a grid")

        def encode(part: Tensor) -> Tensor:
            grid = Grid(len(part) // (rows * columns), rows, columns, self.merge_size, part.device)
            return self._encode(self.patch_embedding.embed(part), grid)

        return in_parts(pixels, rows * columns, rows * columns, encode)

    def dummy_item(self, most_rows: int) -> DummyItem:
        """See `MediaEncoder`: one image, whose patches pass the layers at once."""
        rows, columns = (self.merge_size * side for side in near_square(most_rows))
        pixels = np.zeros((rows * columns, self.patch_embedding.input_size), dtype=np.float32)
        return DummyItem("image", {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, columns]])})

    def _encode(self, hidden_TD: Tensor, grid: Grid) -> Tensor:
        rotation = self.rotary(*grid.coordinates, (grid.rows, grid.columns), hidden_TD.dtype)
        segments = Segments.equal(grid.frames, grid.rows * grid.columns, grid.device)
        (hidden_TD,) = self.layers(hidden_TD, rotation, segments, [self.num_layers])
        return self.merger(hidden_TD)  # type: ignore[no-any-return]


class Qwen2Vision(QwenVision):
    """The encoder of Qwen2-VL."""

    table = _PLAIN

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        fields = encoder_fields(hf_config).section("vision_config")
        size = fields.integer("embed_dim")
        config = VisionLayerConfig.read(
            fields,
            hidden_size=size,
            intermediate_size=int(size * fields.number("mlp_ratio", 4)),
            num_heads=fields.integer("num_heads"),
            norm_eps=_NORM_EPS,
        )
        super().__init__(fields, config, fields.integer("hidden_size"))


class Qwen25Vision(QwenVision):
    """The encoder of Qwen2.5-VL. Tokens are in the order of their windows between patch embedding and merger."""

    table = _GATED

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        fields = encoder_fields(hf_config).section("vision_config")
        config = VisionLayerConfig.read(
            fields, num_heads=fields.integer("num_heads"), norm_eps=_NORM_EPS, has_rms_norm=True, is_gated=True
        )
        super().__init__(fields, config, fields.integer("out_hidden_size"))
        patch_size = square(fields, "patch_size")
        self._window_side = fields.integer("window_size") // self.merge_size // patch_size
        if self._window_side == 0:
            allowed = f"{self.merge_size * patch_size} or more"
            raise fields.unsupported("window_size", fields.hf_config["window_size"], allowed)
        self._full_layers = frozenset(_layers(fields, "fullatt_block_indexes"))

    def _encode(self, hidden_TD: Tensor, grid: Grid) -> Tensor:
        order, sizes = grid.windows(self._window_side)
        group, device = self.merge_size**2, hidden_TD.device
        order_L = torch.from_numpy(order).to(device)
        patches_T = (order_L[:, None] * group + torch.arange(group, device=device)).flatten()
        coordinates = [of_patch.index_select(0, patches_T) for of_patch in grid.coordinates]
        rotation = self.rotary(*coordinates, (grid.rows, grid.columns), hidden_TD.dtype)
        windows = Segments(sizes * group, device)
        frames = Segments.equal(grid.frames, grid.rows * grid.columns, device)
        segments = [frames if layer in self._full_layers else windows for layer in range(self.num_layers)]
        (hidden_TD,) = self.layers(hidden_TD.index_select(0, patches_T), rotation, segments, [self.num_layers])
        merged_LD = self.merger(hidden_TD)
        return torch.empty_like(merged_LD).index_copy_(0, order_L, merged_LD)


class Qwen3Vision(QwenVision):
    """The encoder of Qwen3-VL and Qwen3.5: learned positions besides rotary ones.

    That of Qwen3-VL has DeepStack levels, from earlier layers.
    """

    has_patch_bias = True

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        fields = encoder_fields(hf_config).section("vision_config")
        config = VisionLayerConfig.read(fields, num_heads=fields.integer("num_heads"), norm_eps=_NORM_EPS)
        size = fields.integer("out_hidden_size")
        super().__init__(fields, config, size)
        num_positions = fields.integer("num_position_embeddings")
        self._side = int(num_positions**0.5)
        self.position_embeddings = VocabEmbedding(num_positions, config.hidden_size, parallel=ParallelState())
        levels = _layers(fields, "deepstack_visual_indexes") if "deepstack_visual_indexes" in fields.hf_config else []
        if not set(levels) <= set(range(self.num_layers)):
            raise fields.unsupported("deepstack_visual_indexes", levels, f"indices of depth={self.num_layers} layers")
        self.num_levels = len(levels)
        self._wanted = sorted({*(layer + 1 for layer in levels), self.num_layers})
        self._levels = [self._wanted.index(layer + 1) for layer in levels]
        self.level_mergers = nn.ModuleList(
            PatchMerger(config, self.merge_size, size, norms_merged=True) for _ in levels
        )
        modules = {"norm": "norm", "linear_fc1": "projector.linear_1", "linear_fc2": "projector.linear_2"}
        of_levels = {
            f"{_PREFIX}deepstack_merger_list.{level}.{name}": Into(f"level_mergers.{level}.{module}")
            for level in range(len(levels))
            for name, module in modules.items()
        }
        self.table = {**_DEEPSTACK, **of_levels}

    def _encode(self, hidden_TD: Tensor, grid: Grid) -> Tensor:
        hidden_TD = self._add_positions(hidden_TD, grid)
        rotation = self.rotary(*grid.coordinates, (grid.rows, grid.columns), hidden_TD.dtype)
        segments = Segments.equal(grid.frames, grid.rows * grid.columns, grid.device)
        states = self.layers(hidden_TD, rotation, segments, self._wanted)
        levels = [merger(states[index]) for merger, index in zip(self.level_mergers, self._levels, strict=True)]
        return torch.cat((self.merger(states[-1]), *levels), dim=-1)

    def _add_positions(self, hidden_TD: Tensor, grid: Grid) -> Tensor:
        """Add the square table of learned positions, interpolated to the patches of a frame."""
        rows, columns = grid.of_frame
        positions = torch.zeros(len(rows), hidden_TD.shape[1], dtype=torch.float32, device=grid.device)
        for row, row_weight in self._neighbours(rows, grid.rows):
            for column, column_weight in self._neighbours(columns, grid.columns):
                of_patch = self.position_embeddings(row * self._side + column, NO_CONTEXT)
                positions += of_patch * (row_weight * column_weight)[:, None]
        return hidden_TD + positions.to(hidden_TD.dtype).repeat(grid.frames, 1)

    def _neighbours(self, index: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """The two positions of the table around each index on an axis, and their weights. The ends are at the ends."""
        place = index.to(torch.float32) * (self._side - 1) / max(size - 1, 1)
        before = place.floor()
        weight, first = place - before, before.to(torch.int64)
        return [(first, 1 - weight), ((first + 1).clamp_max(self._side - 1), weight)]
