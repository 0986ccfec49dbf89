"""Attention of a layer in a step: the layer, its rows, its cache, and the step's metadata.

Suffixes: T tokens of the step, R requests of the step, H query heads, K KV heads, D head size, X concatenated heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.paged_attention import NO_SCALES, AttentionSinks, CacheScales, DistanceBiases
from penstock.kernels.rotary import Rotation, apply_rotary
from penstock.parallel.context_share import ContextShare

# Computed by a backend once per step and KV-cache group, for the group's layers. Each backend has its own type.
AttentionMetadata = Any


class SourceLengths:
    """Lengths of the sources of requests, the encoder's outputs that cross attention reads, by slot.

    longest: positions of the longest source. lengths_S: int32 [slots]; None where no request has a slot yet.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.lengths_S: Tensor | None = None

    def of_slots(self, like_R: Tensor, slots_R: Tensor | None) -> Tensor:
        """Lengths of the sources in these slots, int32 like `like_R`; the longest without slots."""
        if self.lengths_S is None or slots_R is None:
            return torch.full_like(like_R, self.longest)
        return self.lengths_S.index_select(0, slots_R)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Parameters of one attention layer, independent of the backend.

    scale: factor on the scores, usually head_size ** -0.5.
    sliding_window: number of visible last positions, including the current one; None for no window.
    chunk_size: chunked local attention: positions of a chunk, outside of which nothing is visible; None for no chunks.
    soft_cap: scaled scores become soft_cap * tanh(score / soft_cap) before the mask; None for no cap.
    context: ranks that shard the positions of the layer's KV heads (decode context parallelism); None without.
    latent_size: latent attention: there is one KV head, and its value is the last so many elements of its key, so that
    the cache keeps keys alone; None for attention with values of their own.
    sinks: of the query heads; None for none. Its tensor is read in every step, since weights are loaded later.
    alibi_slopes: of the query heads: each position between query and key lowers the score by the slope (ALiBi, Press et
    al. 2022, https://arxiv.org/abs/2108.12409); None for none. Not together with a soft cap.
    cpu_arithmetic: "bfloat16" for products in bfloat16 arithmetic over a bfloat16 KV cache (`ModelConfig`).
    cache_scales: of an FP8 KV cache, from the checkpoint; None if it has none. They are constants of a recorded step.
    is_causal: False for attention in both directions over whole texts, without a KV cache; `sliding_window` then counts
    the visible positions on either side, the current one included.
    distance_biases: of each query head and distance between a query and a key, added to the scaled score; None for
    none. Its tensor is read in every step. Not together with a soft cap or ALiBi.
    sources: cross attention: each token reads the whole source of its request, of these lengths; None for others.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    context: ContextShare | None = None
    latent_size: int | None = None
    sinks: AttentionSinks | None = None
    cpu_arithmetic: str = "float32"
    chunk_size: int | None = None
    cache_scales: CacheScales | None = None
    alibi_slopes: tuple[float, ...] | None = None
    is_causal: bool = True
    distance_biases: DistanceBiases | None = None
    sources: SourceLengths | None = None

    def scales_in(self, kv_cache: Tensor) -> CacheScales:
        """Return the scales of this cache's keys and values: 1 without scales, and in other dtypes than FP8."""
        return self.cache_scales or NO_SCALES if kv_cache.dtype is torch.float8_e4m3fn else NO_SCALES

    @property
    def window(self) -> int | None:
        """The sliding window, or the size of chunks as a negative number, as kernels take it; None for neither."""
        return self.sliding_window if self.chunk_size is None else -self.chunk_size

    @property
    def value_size(self) -> int:
        """Elements of a head's value, and of its output."""
        return self.head_size if self.latent_size is None else self.latent_size

    @property
    def bias_values(self) -> Tensor | None:
        """The biases by distance, [H, N]; None for none."""
        return None if self.distance_biases is None else self.distance_biases.biases

    @property
    def sink_values(self) -> Tensor | None:
        """The values of the sinks, [H]; None for none."""
        return None if self.sinks is None else self.sinks.sinks


class HeadNorm(Protocol):
    """Normalisation of query and key heads, [T, H + K, D], before rotary embedding, or after it."""

    @property
    def follows_rotation(self) -> bool:
        """Whether heads are rotated first."""

    @property
    def rms_of_each_head(self) -> tuple[Tensor, float] | None:
        """The weight [H + K, D] and the epsilon, if this is an RMSNorm of each head; else None.

        A weight of the heads' dtype stands for `rms_norm`, one in float32 for `rms_norm_rounded_last`.
        """

    def __call__(self, query_key_THD: Tensor, /) -> Tensor: ...


class Heads(NamedTuple):
    """Query, key and value heads of a step's tokens, ready for attention.

    query_THD: [T, H, D]. key_TKD, value_TKD: [T, K, D]. They may be strided views with a contiguous last dimension.
    """

    query_THD: Tensor
    key_TKD: Tensor
    value_TKD: Tensor


class Projection(NamedTuple):
    """Output of the QKV projection, whose query and key heads are still to be normalised and rotated.

    qkv_TX: [T, (H + 2 * K) * D], query heads, key heads, value heads; attention may overwrite it. Of latent attention,
    [T, (H + 1) * D]. norm, rotation: None for none.
    """

    qkv_TX: Tensor
    norm: HeadNorm | None
    rotation: Rotation | None

    def heads(self, layer: LayerAttention) -> Heads:
        """Split into heads, with norm and rotary embedding applied, in place where possible."""
        norm, num_query_key_heads = self.norm, layer.num_heads + layer.num_kv_heads
        heads_THD = self.qkv_TX.view(self.qkv_TX.shape[0], -1, layer.head_size)
        query_key_THD = heads_THD[:, :num_query_key_heads]
        if norm is not None and not norm.follows_rotation:
            query_key_THD = norm(query_key_THD)
        if self.rotation is not None:
            apply_rotary(query_key_THD, self.rotation)
        if norm is not None and norm.follows_rotation:
            query_key_THD = norm(query_key_THD)
        query_THD, key_TKD = query_key_THD.split_with_sizes([layer.num_heads, layer.num_kv_heads], 1)
        if layer.latent_size is not None:
            return Heads(query_THD, key_TKD, key_TKD[..., layer.head_size - layer.latent_size :])
        return Heads(query_THD, key_TKD, heads_THD[:, num_query_key_heads:])


# What a layer hands to attention.
AttentionRows = Heads | Projection


class LastRows(NamedTuple):
    """Narrowing of attention to the last token of each request.

    rows_R: int64, rows of the last tokens. metadata: of `StepGeometry.of_last_tokens`.
    """

    rows_R: Tensor
    metadata: AttentionMetadata


class AttentionStep(NamedTuple):
    """Attention of a layer in a step.

    rows: None where the layer reads the cache alone. kv_cache: the layer's, in its backend's layout.
    metadata: the step's, of the layer's KV-cache group.
    last: the keys and values of all tokens are written, but the last tokens alone attend; None for all tokens.
    visible_ends: `VISIBLE_ENDS`, int32 [T]; None where attention is causal, as that of last tokens always is.
    """

    layer: LayerAttention
    rows: AttentionRows | None
    kv_cache: Tensor
    metadata: AttentionMetadata
    last: LastRows | None = None
    visible_ends: Tensor | None = None

    def heads(self) -> Heads:
        """The step's heads, prepared from a projection."""
        assert self.rows is not None, "a layer that writes has rows"
        return self.rows if isinstance(self.rows, Heads) else self.rows.heads(self.layer)

    def narrow(self, query_THD: Tensor) -> tuple[AttentionStep, Tensor]:
        """The step of the tokens that attend, and their queries: of the last tokens where the step is narrowed."""
        if self.last is None:
            return self, query_THD
        rows_R, metadata = self.last
        return self._replace(metadata=metadata, last=None), query_THD.index_select(0, rows_R)
