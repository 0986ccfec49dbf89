"""Layers that several vision encoders share. Every rank has them whole.

An item's tokens are those of all its tiles or frames, one after the other.
Suffixes: N images or tiles, C channels, T tokens of an item, D hidden size, X concatenated heads, S tokens of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT, AttentionStep, LayerAttention, Projection, SequenceGeometry
from penstock.attention.whole_texts import WholeTextsBackend
from penstock.errors import ModelError
from penstock.kernels.activation import ACTIVATIONS, GATED_ACTIVATIONS, Activation, quick_gelu
from penstock.kernels.native import NATIVE
from penstock.kernels.rotary import Rotation, gather_rotation, rotary_table
from penstock.kernels.rows import sum_rows
from penstock.layers.linear import LinearLayer
from penstock.layers.mlp import GatedMLP, PlainMLP
from penstock.layers.norm import LayerNorm, RMSNorm, WholeQueryKeyNorm, norm_of_stream
from penstock.layers.parallel_linear import QKVParallelLinear
from penstock.layers.weights import WeightSlot, new_parameter
from penstock.models.config_fields import Fields
from penstock.models.multimodal.interface import MediaEncoder
from penstock.models.seq2seq import QKVWithoutKeyBias
from penstock.models.weights import Into, WeightTable, expand_table
from penstock.parallel import ParallelState

VISION_ACTIVATIONS: Mapping[str, Activation] = {**ACTIVATIONS, "quick_gelu": quick_gelu}
# Beginnings of the names of a tower's tensors, and of a projector's.
TOWER, PROJECTOR = "model.vision_tower.", "model.multi_modal_projector."
PROJECTOR_TABLE: WeightTable = {
    f"{PROJECTOR}linear_1": Into("projector.linear_1"),
    f"{PROJECTOR}linear_2": Into("projector.linear_2"),
}
# Tokens that pass the layers at once, if tiles and frames are no larger; it bounds the memory of activations.
_TOKENS_AT_ONCE = 8192
_WHOLE = ParallelState()
_NO_CACHE = torch.empty(0, device="cpu")


def encoder_fields(hf_config: Mapping[str, Any]) -> Fields:
    """The fields of a multimodal model's configuration."""
    name, architectures = hf_config.get("_name_or_path"), hf_config.get("architectures")
    architecture = architectures[0] if architectures else "the encoder"
    return Fields(hf_config, f"config.json of {name}" if name else "config.json", architecture)


def square(fields: Fields, name: str) -> int:
    """A size that is a positive integer, or a pair of equal ones. Raises ModelError, or UnsupportedFeature."""
    value = fields.hf_config.get(name)
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        return Fields({name: value[0]}, fields.source, fields.architecture, fields.prefix).integer(name)
    if isinstance(value, list | tuple):
        raise fields.unsupported(name, value, "one size for both directions")
    return fields.integer(name)


def rope_theta(fields: Fields) -> float:
    """Base of axial rotary embeddings."""
    given = fields.hf_config.get("rope_parameters") or {}
    theta = given.get("rope_theta", fields.hf_config.get("rope_theta"))
    return Fields({"rope_theta": theta}, fields.source, fields.architecture, fields.prefix).number(
        "rope_theta", 10000.0
    )


class TableEncoder(MediaEncoder):
    """Encoder whose checkpoint tensors are in a table of modules.

    table: with `*` for each of num_layers. renames: beginnings of published names, and what stands for them in the
    table. own: beginnings of the names of the encoder's tensors, then.
    """

    table: WeightTable
    renames: ClassVar[Mapping[str, str]]
    own: ClassVar[tuple[str, ...]]
    num_layers: int

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return expand_table(self, self.table, self.num_layers)

    def checkpoint_name(self, name: str) -> str | None:
        for old, new in self.renames.items():
            if name.startswith(old):
                name = new + name[len(old) :]
        return name if name.startswith(self.own) else None


class TowerEncoder(TableEncoder):
    """Encoder of a vision tower and a projector, by the names that most families have for both."""

    renames: ClassVar[Mapping[str, str]] = {
        "vision_tower.": TOWER,
        f"{TOWER}vision_model.": TOWER,
        "multi_modal_projector.": PROJECTOR,
        "image_newline": "model.image_newline",
    }
    own: ClassVar[tuple[str, ...]] = (TOWER, PROJECTOR, "model.image_newline")


class PatchEmbedding(LinearLayer):
    """A convolution whose stride is its kernel's size, as a product with flattened patches.

    kernel: size in each dimension. Patches are [T, C * kernel].
    """

    keeps_precision = True

    def __init__(self, channels: int, kernel: Sequence[int], hidden_size: int, *, bias: bool) -> None:
        super().__init__(channels * int(np.prod(kernel)), hidden_size, bias=bias)
        self._shape = (hidden_size, channels, *kernel)

    def embed(self, patches: Tensor) -> Tensor:
        """Embed patches of any float dtype: [T, D]."""
        return self(patches.to(self.compute_dtype or self.weight.dtype), NO_CONTEXT)  # type: ignore[no-any-return]

    def embed_images(self, images_NCHW: Tensor) -> Tensor:
        """Embed the patches of images, row by row: [N * rows * columns, D]. Pixels beyond whole patches are dropped."""
        channels, *kernel = self._shape[1:]
        if images_NCHW.dim() != 4 or images_NCHW.shape[1] != channels or min(images_NCHW.shape[2:]) < kernel[0]:
            returned, wanted = f"pixels of the shape {list(images_NCHW.shape)}", f"{kernel[0]} x {kernel[1]}"
            raise does_not_fit(returned, f"images with {channels} channels, in patches of {wanted}")
        height, width = kernel
        rows, columns = images_NCHW.shape[2] // height, images_NCHW.shape[3] // width
        whole = images_NCHW[:, :, : rows * height, : columns * width]
        patches = whole.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
        return self.embed(patches.reshape(-1, self.input_size))

    def zeros(self, num_images: int, rows: int, columns: int) -> np.ndarray:
        """Pixels of at least one image of this many patches, for a `DummyItem`: [N, C, H, W]."""
        channels, height, width = self._shape[1:]
        return np.zeros((max(1, num_images), channels, rows * height, columns * width), dtype=np.float32)

    def slots(self) -> dict[str, WeightSlot]:
        slots = {"weight": WeightSlot(self._shape, self.weight.view(self._shape))}
        return slots if self.bias is None else slots | {"bias": WeightSlot((self.output_size,), self.bias)}


def feature_layers(fields: Fields, num_layers: int, default: int) -> list[int]:
    """Numbers of the layers whose outputs are an encoder's features, in their order; 0 is the input of the first.

    Raises UnsupportedFeature for others.
    """
    value = fields.hf_config.get("vision_feature_layer", default)
    indices = value if isinstance(value, list | tuple) else [value]
    if not indices or not all(isinstance(index, int) and -num_layers - 1 <= index <= num_layers for index in indices):
        raise fields.unsupported("vision_feature_layer", value, f"integers from {-num_layers - 1} to {num_layers}")
    return [index % (num_layers + 1) for index in indices]


class Segments:
    """Runs of an item's tokens, such as tiles, frames or windows, that attend among themselves.

    lengths: of the runs, in order. is_visible_NS: whether a token is attended to, by run, where all runs have one
    length; None for all.
    """

    def __init__(self, lengths: np.ndarray, device: torch.device, is_visible_NS: Tensor | None = None) -> None:
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        tensors = [torch.from_numpy(values).to(device) for values in (starts, lengths.astype(np.int32))]
        self.longest = int(lengths.max())
        geometry = SequenceGeometry(tensors[0], starts, tensors[1], int(starts[-1]), len(lengths), self.longest)
        self.metadata = WholeTextsBackend().make_metadata(geometry)
        self.is_visible_NS = is_visible_NS
        self.are_equal = bool((lengths == self.longest).all())
        self._lengths, self._starts, self._device = lengths, starts, device

    @classmethod
    def equal(cls, num_runs: int, length: int, device: torch.device) -> Segments:
        """Runs of one length."""
        return cls(np.full(num_runs, length), device)

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Runs padded to the longest: the token at each place, [N, S]; whether there is one; and each token's place."""
        offsets, lengths = np.arange(self.longest), self._lengths[:, None]
        tokens = self._starts[:-1, None] + np.minimum(offsets, lengths - 1)
        is_token = offsets < lengths
        arrays = tokens, is_token, np.flatnonzero(is_token)
        tokens_NS, is_token_NS, places_T = (torch.from_numpy(array).to(self._device) for array in arrays)
        return tokens_NS, is_token_NS, places_T


class AxialRotary(nn.Module):
    """Rotary embedding by the row and the column of a patch.

    row_frequencies, column_frequencies: float32, of the angles of a head in order, radians per patch: rows first.
    """

    row_frequencies: Tensor
    column_frequencies: Tensor

    def __init__(self, row_frequencies: Tensor, column_frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("row_frequencies", row_frequencies, persistent=False)
        self.register_buffer("column_frequencies", column_frequencies, persistent=False)

    @classmethod
    def of(cls, head_size: int, theta: float) -> AxialRotary:
        """Equal frequencies for rows and columns, of half a head each."""
        half = head_size // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half
        frequencies = 1.0 / theta**exponents
        return cls(frequencies, frequencies.clone())

    def forward(self, rows_T: Tensor, columns_T: Tensor, sides: tuple[int, int], dtype: torch.dtype) -> Rotation:
        """Rotation of heads. rows_T, columns_T: int64, below `sides`."""
        of_rows = rotary_table(self.row_frequencies, sides[0], 1.0).index_select(0, rows_T).chunk(2, -1)
        of_columns = rotary_table(self.column_frequencies, sides[1], 1.0).index_select(0, columns_T).chunk(2, -1)
        table = torch.cat((of_rows[0], of_columns[0], of_rows[1], of_columns[1]), dim=-1)
        return gather_rotation(table, torch.arange(len(table), device=table.device), dtype)


@dataclass(frozen=True, slots=True)
class VisionLayerConfig:
    """Parameters of the layers of a vision transformer.

    is_gated, mlp_bias: whether the feed-forward networks are; plain ones have biases. key_bias: whether keys have one
    where queries and values do. has_query_key_norm: RMSNorm of
    all query heads together, and of all key heads. has_scales: factors of what attention and feed-forward add.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    activation: str
    norm_eps: float
    has_rms_norm: bool = False
    is_gated: bool = False
    mlp_bias: bool = True
    qkv_bias: bool = True
    key_bias: bool = True
    out_bias: bool = True
    has_query_key_norm: bool = False
    has_scales: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def norm(self, size: int | None = None) -> RMSNorm | LayerNorm:
        """A norm over hidden states, or over rows of another size."""
        return (RMSNorm if self.has_rms_norm else LayerNorm)(size or self.hidden_size, self.norm_eps)

    @classmethod
    def read(cls, fields: Fields, **given: Any) -> VisionLayerConfig:
        """Read `vision_config`. given: what the family's configuration has no field of, or another name for."""
        is_gated = given.get("is_gated", False)
        read: dict[str, Any] = {"activation": vision_activation(fields, is_gated=is_gated), **given}
        for name, field in (
            ("hidden_size", "hidden_size"),
            ("intermediate_size", "intermediate_size"),
            ("num_heads", "num_attention_heads"),
        ):
            if name not in read:
                read[name] = fields.integer(field)
        if "norm_eps" not in read:
            read["norm_eps"] = fields.number("layer_norm_eps", 1e-6)
        if read["hidden_size"] % read["num_heads"] != 0:
            raise fields.unsupported("hidden_size", read["hidden_size"], f"multiples of {read['num_heads']} heads")
        return cls(**read)


def vision_activation(fields: Fields, name: str = "hidden_act", *, is_gated: bool = False) -> str:
    """The name of an activation function. Raises UnsupportedFeature for another one."""
    return fields.choice(name, GATED_ACTIVATIONS if is_gated else VISION_ACTIVATIONS, default="gelu")


class VisionAttention(nn.Module):
    """Attention in both directions among the tokens of each segment."""

    def __init__(self, config: VisionLayerConfig) -> None:
        super().__init__()
        size, heads, head_size = config.hidden_size, config.num_heads, config.head_size
        make = QKVParallelLinear if config.key_bias else QKVWithoutKeyBias
        self.qkv_proj = make(
            size, num_heads=heads, num_kv_heads=heads, head_size=head_size, bias=config.qkv_bias, parallel=_WHOLE
        )
        self.norm: WholeQueryKeyNorm | None = None
        if config.has_query_key_norm:
            self.norm = WholeQueryKeyNorm(num_heads=heads, num_kv_heads=heads, head_size=head_size, eps=1e-6)
        self.o_proj = LinearLayer(size, size, bias=config.out_bias)
        self._layer = LayerAttention(
            "vision", num_heads=heads, num_kv_heads=heads, head_size=head_size, scale=head_size**-0.5, is_causal=False
        )
        self._backend = WholeTextsBackend()

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        qkv_TX = self.qkv_proj(hidden_TD, NO_CONTEXT)
        if self.norm is not None:
            query_key_THD = qkv_TX[:, : 2 * hidden_TD.shape[1]].unflatten(-1, (-1, self._layer.head_size))
            query_key_THD.copy_(self.norm(query_key_THD))
        rows = Projection(qkv_TX, None, rotation)
        if NATIVE is not None and NATIVE.runs(qkv_TX) and segments.is_visible_NS is None:
            mixed_TX = self._backend.run(AttentionStep(self._layer, rows, _NO_CACHE, segments.metadata))
        else:
            mixed_TX = _attend_by_torch(self._layer, rows, segments)
        return self.o_proj(mixed_TX, NO_CONTEXT)  # type: ignore[no-any-return]


def _attend_by_torch(layer: LayerAttention, rows: Projection, segments: Segments) -> Tensor:
    """Attention among the tokens of all runs in one call: [T, X]."""
    mask_NS = segments.is_visible_NS
    if segments.are_equal:
        runs_NSHD = [x_THD.unflatten(0, (-1, segments.longest)) for x_THD in rows.heads(layer)]
    else:
        tokens_NS, mask_NS, places_T = segments.padded
        runs_NSHD = [x_THD[tokens_NS] for x_THD in rows.heads(layer)]
    query, key, value = (x_NSHD.transpose(1, 2) for x_NSHD in runs_NSHD)
    mask = None if mask_NS is None else mask_NS[:, None, None]
    mixed = F.scaled_dot_product_attention(query, key, value, mask, scale=layer.scale)
    mixed_TX = mixed.transpose(1, 2).flatten(2).flatten(0, 1)
    return mixed_TX if segments.are_equal else mixed_TX.index_select(0, places_T)


class LayerScales(nn.Module):
    """Factors of what a layer's two halves add to the residual stream (Touvron et al. 2021)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.lambda_1, self.lambda_2 = new_parameter(size), new_parameter(size)


class VisionLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with x as two tensors, as in `DecoderLayer`."""

    def __init__(self, config: VisionLayerConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.attention_norm, self.mlp_norm = config.norm(), config.norm()
        self.attention = VisionAttention(config)
        self.mlp: nn.Module
        if config.is_gated:
            self.mlp = GatedMLP(size, inner, activation=config.activation, bias=config.mlp_bias, parallel=_WHOLE)
        else:
            self.mlp = PlainMLP(size, inner, activation=VISION_ACTIVATIONS[config.activation], parallel=_WHOLE)
        self.scales = LayerScales(size) if config.has_scales else None

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation | None, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        hidden_TD, residual_TD = norm_of_stream(self.attention_norm, hidden_TD, residual_TD)
        hidden_TD = self.attention(hidden_TD, rotation, segments)
        if self.scales is not None:
            hidden_TD.mul_(self.scales.lambda_1)
        hidden_TD, residual_TD = self.mlp_norm.add_and_norm(hidden_TD, residual_TD)
        hidden_TD = self.mlp(hidden_TD, NO_CONTEXT)
        return hidden_TD if self.scales is None else hidden_TD.mul_(self.scales.lambda_2), residual_TD


class VisionLayers(nn.ModuleList):
    """The layers of a vision transformer."""

    def __init__(self, config: VisionLayerConfig, num_layers: int) -> None:
        super().__init__(VisionLayer(config) for _ in range(num_layers))

    def forward(
        self,
        hidden_TD: Tensor,
        rotation: Rotation | None,
        segments: Segments | Sequence[Segments],
        wanted: Sequence[int],
    ) -> list[Tensor]:
        """Hidden states [T, D] after these numbers of layers, ascending; 0 is the input. segments: may be by layer."""
        by_layer = [segments] * len(self) if isinstance(segments, Segments) else segments
        residual_TD: Tensor | None = None
        states = [hidden_TD] * (0 in wanted)
        for number, (layer, of_layer) in enumerate(zip(self, by_layer, strict=True), 1):
            hidden_TD, residual_TD = layer(hidden_TD, residual_TD, rotation, of_layer)
            if number in wanted:
                states.append(sum_rows(hidden_TD, residual_TD))
        return states


class Projector(nn.Module):
    """linear_2(activation(linear_1(x))). activation: a name in `VISION_ACTIVATIONS`."""

    def __init__(self, input_size: int, inner: int, output_size: int, *, activation: str, bias: bool = True) -> None:
        super().__init__()
        self.linear_1 = LinearLayer(input_size, inner, bias=bias)
        self.linear_2 = LinearLayer(inner, output_size, bias=bias)
        self._activate = VISION_ACTIVATIONS[activation]

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.linear_2(self._activate(self.linear_1(x_TD, NO_CONTEXT)), NO_CONTEXT)  # type: ignore[no-any-return]


def merge_neighbours(hidden_TD: Tensor, rows: int, columns: int, side: int) -> Tensor:
    """Concatenate the patches of squares of side * side, row by row: [T / side^2, side^2 * D].

    Patches beyond whole squares are dropped.
    """
    images = hidden_TD.view(-1, rows, columns, hidden_TD.shape[1])
    whole = images[:, : rows // side * side, : columns // side * side]
    squares: Tensor = whole.unflatten(2, (columns // side, side)).unflatten(1, (rows // side, side)).transpose(2, 3)
    return squares.reshape(-1, side * side * hidden_TD.shape[1])


def near_square(most: int) -> tuple[int, int]:
    """Sides of a grid with nearly as many places as allowed, and at least one."""
    side = max(1, math.isqrt(most))
    return side, max(1, most // side)


def in_parts(inputs: Tensor, rows: int, tokens: int, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """Encode tiles or frames, which do not depend on each other, some at a time, and concatenate the results.

    inputs: `rows` rows for each. tokens: of each.
    """
    parts = inputs.split(max(1, _TOKENS_AT_ONCE // tokens) * rows)
    return encode(parts[0]) if len(parts) == 1 else torch.cat([encode(part) for part in parts])


def does_not_fit(returned: str, taken: str) -> ModelError:
    """The error for inputs of an image processor that is not the model's."""
    return ModelError(
        f"The image processor returned {returned}, and the vision encoder takes {taken}. preprocessor_config.json does "
        "not fit config.json."
    )


def check_squares(images_NCHW: Tensor, side: int, patch_size: int) -> None:
    """Raise ModelError for images that do not have as many patches on each side."""
    if any(pixels // patch_size != side for pixels in images_NCHW.shape[-2:]):
        pixels = side * patch_size
        raise does_not_fit(f"pixels of the shape {list(images_NCHW.shape)}", f"images of {pixels} x {pixels}")


def host_integers(values: Tensor) -> list[int]:
    """The elements of a tensor of integers on the host, in order."""
    return [int(value) for value in values.reshape(-1).numpy()]
