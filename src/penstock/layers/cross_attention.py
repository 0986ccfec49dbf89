"""Cross attention: queries of the decoder's tokens, keys and values of the encoder's output.

Suffixes: T tokens, S positions of a source, K KV heads, D hidden size or head size, X concatenated heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention, SourceLengths
from penstock.contract import CrossAttentionSpec
from penstock.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from penstock.parallel import ParallelState, heads_of_rank


class CrossAttention(nn.Module):
    """Cross attention of one layer. sources: lengths of the sources, which all layers of a model share.

    scale: factor on the scores. bias: of queries, values and outputs; key_bias: of keys. hidden_size: of both sides.
    heads: of this rank, among all of `group`.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        *,
        num_heads: int,
        head_size: int,
        scale: float,
        bias: bool,
        key_bias: bool,
        sources: SourceLengths,
        parallel: ParallelState,
    ) -> None:
        super().__init__()
        heads, _ = heads_of_rank(num_heads, num_heads, parallel.tensor)
        self.heads, self.group = heads, parallel.tensor
        width, share = num_heads * head_size, heads * head_size
        self.q_proj = ColumnParallelLinear(hidden_size, width, bias=bias, parallel=parallel, share=share)
        self.k_proj = ColumnParallelLinear(hidden_size, width, bias=key_bias, parallel=parallel, share=share)
        self.v_proj = ColumnParallelLinear(hidden_size, width, bias=bias, parallel=parallel, share=share)
        self.o_proj = RowParallelLinear(width, hidden_size, bias=bias, parallel=parallel)
        self.layer = LayerAttention(
            name,
            num_heads=heads.size,
            num_kv_heads=heads.size,
            head_size=head_size,
            scale=scale,
            sources=sources,
        )

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        """[T, D], of all tokens also where the context is narrowed to last ones."""
        context = context.of_all_tokens()
        query_TX = self.q_proj(hidden_TD, context)
        width = self.layer.num_heads * self.layer.head_size
        (mixed_TX,) = context.opaque(self._read, query_TX, widths=[width], by_library=self._recorded_read)
        return self.o_proj(mixed_TX, context)  # type: ignore[no-any-return]

    def _read(self, context: ForwardContext, query_TX: Tensor) -> list[Tensor]:
        return [context.read_cache(self.layer, query_TX)]

    def _recorded_read(self, context: ForwardContext, query_TX: Tensor) -> list[Tensor] | None:
        mixed_TX = context.recorded_read(self.layer, query_TX)
        return None if mixed_TX is None else [mixed_TX]

    def keys_and_values(self, source_SD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Keys and values of an encoder's output, [S, K, D] each."""
        keys_SX, values_SX = self.k_proj(source_SD, context), self.v_proj(source_SD, context)
        shape = len(source_SD), -1, self.layer.head_size
        return keys_SX.view(shape), values_SX.view(shape)

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> CrossAttentionSpec:
        """KV cache spec of this layer. block_size: positions per block. dtype: of the cache, by name."""
        layer = self.layer
        assert layer.sources is not None, "cross attention has sources"
        return CrossAttentionSpec(
            block_size=block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=dtype,
            max_source_positions=layer.sources.longest,
        )
