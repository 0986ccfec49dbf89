"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1), in its absorbed form.

Suffixes: T tokens, D hidden size, H heads, C latent size, X concatenated heads, Y output of the first projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention
from penstock.device.stand_in import is_on_cpu
from penstock.kernels.latent import absorb, expand
from penstock.kernels.linear import linear
from penstock.kernels.native import NativeKernels
from penstock.kernels.native.latent_shape import LatentShape
from penstock.kernels.norm import leading_rms_norm
from penstock.kernels.rotary import Rotation
from penstock.layers.attention import Attention
from penstock.layers.linear import LinearLayer, LinearMethod, PackedMethod, PlainMethod
from penstock.layers.norm import RMSNorm
from penstock.layers.parallel_linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from penstock.parallel import ParallelState, Share
from penstock.parallel.share import heads_of_rank
from penstock.system.env import uses_torch_products

# Of the norms of latents, whatever the other norms have.
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentAttentionSizes:
    """Sizes of latent attention over all ranks, by their names in `config.json`.

    q_lora_rank: size of the queries' latent; None for queries from the hidden states. scale: factor on the scores.
    rope_interleave: the rotated pairs are adjacent dimensions.
    """

    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int | None
    scale: float
    rope_interleave: bool


class LatentUpProjection(ColumnParallelLinear):
    """`kv_b_proj`, from latents to keys and values of all heads, whose weight goes to queries and outputs instead.

    It keeps the precision of its weight, which multiplies from both sides.
    """

    keeps_precision = True

    def __init__(self, shape: LatentShape, share: Share, *, parallel: ParallelState) -> None:
        super().__init__(shape.latent_size, share.whole, bias=False, parallel=parallel, share=share)
        self.shape = shape

    def absorb(self, query_TX: Tensor, rows_TY: Tensor, norm: RMSNorm) -> Tensor:
        """As `kernels.latent.absorb`."""
        if isinstance(self.method, NativeLatentMethod):
            return self.method.absorb(query_TX, rows_TY, norm)
        weight_HNC = self._by_head[:, : self.shape.nope_size]
        parameters = norm.weight, norm.eps, self.shape
        return absorb(query_TX, rows_TY, weight_HNC, *parameters, is_invariant=self.batch_invariant)

    def expand(self, latent_TX: Tensor) -> Tensor:
        """As `kernels.latent.expand`."""
        if isinstance(self.method, NativeLatentMethod):
            return self.method.expand(latent_TX)
        weight_HVC = self._by_head[:, self.shape.nope_size :]
        return expand(latent_TX, weight_HVC, is_invariant=self.batch_invariant)

    def own_method(self, kernels: NativeKernels | None) -> LinearMethod:
        is_ours = is_on_cpu(self.weight) and (self.compute_dtype or self.weight.dtype) is torch.float32
        if kernels is None or not is_ours or uses_torch_products():
            return PlainMethod()
        return NativeLatentMethod(kernels, self.shape)

    @property
    def _by_head(self) -> Tensor:
        return self.weight.view(self.shape.num_heads, -1, self.shape.latent_size)


class NativeLatentMethod(PackedMethod):
    """Penstock's C++ kernels, with a weight of each head's keys and one of its values."""

    def __init__(self, kernels: NativeKernels, shape: LatentShape) -> None:
        super().__init__()
        self._kernels, self._shape = kernels, shape
        self._values: Tensor | None = None

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return super().kept if self._values is None else (*super().kept, self._values)

    def pack(self, weight_OI: Tensor) -> Tensor:
        keys_HNC, values_HVC = weight_OI.unflatten(0, (self._shape.num_heads, -1)).split(
            [self._shape.nope_size, self._shape.value_size], 1
        )
        self._values = self._kernels.pack_head_weights(values_HVC)
        return self._kernels.pack_head_weights(keys_HNC.transpose(1, 2))

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        assert self._values is not None, "unpack before pack"
        keys_HCN = self._kernels.unpack_head_weights(packed_OI, self._shape.num_heads, self._shape.latent_size)
        values_HVC = self._kernels.unpack_head_weights(self._values, self._shape.num_heads, self._shape.value_size)
        return torch.cat((keys_HCN.transpose(1, 2), values_HVC), 1).flatten(0, 1)

    def restore_weights(self, layer: LinearLayer) -> None:
        super().restore_weights(layer)
        self._values = None

    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        return linear(x_TI, self.unpack(packed_OI, output_size), bias_O)

    def absorb(self, query_TX: Tensor, rows_TY: Tensor, norm: RMSNorm) -> Tensor:
        """As `kernels.latent.absorb`."""
        assert self.packed_OI is not None, "absorb before process_weights_after_loading"
        return self._kernels.absorb(query_TX, rows_TY, self.packed_OI, norm.weight, norm.eps, self._shape)

    def expand(self, latent_TX: Tensor) -> Tensor:
        """As `kernels.latent.expand`."""
        assert self._values is not None, "expand before process_weights_after_loading"
        return self._kernels.head_products(latent_TX, self._values, self._shape.num_heads, self._shape.value_size)


class LatentAttention(nn.Module):
    """Attention over latents: the cache has one vector per position, and scores and sums are made in its space.

    Queries and the latent are projected together.
    """

    def __init__(
        self, sizes: LatentAttentionSizes, hidden_size: int, layer: int, parallel: ParallelState, *, bias: bool
    ) -> None:
        super().__init__()
        heads, _ = heads_of_rank(sizes.num_heads, sizes.num_heads, parallel.tensor)
        shape = LatentShape(
            heads.size,
            sizes.qk_nope_head_dim,
            sizes.qk_rope_head_dim,
            sizes.kv_lora_rank,
            sizes.v_head_dim,
            sizes.rope_interleave,
        )
        queries, rank = heads * shape.query_size, sizes.q_lora_rank
        shares = {"q": queries if rank is None else _of_all(rank), "kv": _of_all(shape.key_size)}
        self.qkv_a_proj = MergedColumnParallelLinear(hidden_size, shares, bias=bias)
        self.q_a_layernorm = self.q_b_proj = None
        if rank is not None:
            self.q_a_layernorm = RMSNorm(rank, _NORM_EPS)
            self.q_b_proj = ColumnParallelLinear(rank, queries.whole, bias=False, parallel=parallel, share=queries)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, _NORM_EPS)
        self.kv_b_proj = LatentUpProjection(shape, heads * (shape.nope_size + shape.value_size), parallel=parallel)
        self.attn = Attention(
            LayerAttention(
                f"model.layers.{layer}.self_attn.attn",
                num_heads=shape.num_heads,
                num_kv_heads=1,
                head_size=shape.key_size,
                scale=sizes.scale,
                latent_size=shape.latent_size,
            )
        )
        self.o_proj = RowParallelLinear(sizes.num_heads * sizes.v_head_dim, hidden_size, bias=bias, parallel=parallel)

    def forward(self, hidden_TD: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        of_all = context.of_all_tokens()
        rows_TY = query_TX = self.qkv_a_proj(context.whole(hidden_TD), of_all)
        if self.q_b_proj is not None:
            assert self.q_a_layernorm is not None, "both or none"
            query_TX = self.q_b_proj(leading_rms_norm(rows_TY, self.q_a_layernorm.weight, _NORM_EPS), of_all)
        heads_TX = self.kv_b_proj.absorb(query_TX, rows_TY, self.kv_a_layernorm)
        latent_TX = self.attn.from_projection(heads_TX, None, rotation, context)
        mixed_TX = self.kv_b_proj.expand(latent_TX)
        return self.o_proj(mixed_TX, context)  # type: ignore[no-any-return]


def _of_all(size: int) -> Share:
    """Share of outputs that every rank has."""
    return Share(0, size, size)
