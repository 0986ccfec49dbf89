"""C++ attention kernel, called with tensors.

Suffixes: T tokens of the step, R requests, H query heads, K KV heads, D head size, B blocks per request, X
concatenated heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.native.bfloat16_layout import Bfloat16Layout
from penstock.kernels.native.collectives import Collectives
from penstock.kernels.native.operation_types import OperationType
from penstock.kernels.native.tracing import TracedRequests, TracedTensor, Untraceable
from penstock.kernels.paged_attention import AttentionSinks, DistanceBiases

# The library's numbers of the phases of a call, which may be run separately.
_BOTH, _WRITE, _ATTEND, _WHOLE_TEXTS = 0, 1, 2, 3
# No normalisation and no rotary embedding; unused row arguments.
_AS_THEY_ARE = (None, 0.0, False, None, 0)
_NOTHING = (0, 0)
# Library arguments of a group of one rank.
_ALONE = (0, 0, 1, 0, 0, 0)
# Library arguments of a cache that there is not.
_NO_CACHE = (0, 0, 0, 0)
# KV cache dtypes, with the library's numbers.
CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def cache_arguments(kv_cache: Tensor, shape: HeadShape) -> tuple[int, int, int, int]:
    """Library arguments of a cache: [2, blocks, K, ...] of one of `CACHE_TYPES`, at any address.

    The heads of all blocks must have a constant stride. Of latent attention, [1, blocks, 1, block_size, D].
    """
    size, keys = kv_cache.element_size(), kv_cache.data_ptr()
    if shape.latent_size:
        values = keys + (kv_cache.shape[-1] - shape.latent_size) * size
        return keys, values, kv_cache.stride(1) * size, CACHE_TYPES[kv_cache.dtype]
    layout = shape.bfloat16_layout
    cache_type = CACHE_TYPES[kv_cache.dtype] if layout is None else layout.value[0]
    return keys, keys + kv_cache.stride(0) * size, kv_cache.stride(2) * size, cache_type


@dataclass(frozen=True, slots=True)
class StepRequests:
    """Tokens and blocks of a step's requests, as library arguments; one for all layers of a group.

    query_start_loc: int32 [R + 1] or more. seq_lens: int32 [R] or more. block_table: int32 [R, B], contiguous rows.
    visible_ends: `VISIBLE_ENDS`; None for causal attention.
    """

    arguments: tuple[int, ...]
    keeps_alive: tuple[Tensor, ...]
    visible_ends: Tensor | None = None

    @classmethod
    def of(cls, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, num_requests: int) -> StepRequests:
        return cls(
            (
                query_start_loc.data_ptr(),
                seq_lens.data_ptr(),
                block_table.data_ptr(),
                block_table.stride(0),
                num_requests,
            ),
            (query_start_loc, seq_lens, block_table),
        )

    @classmethod
    def without_blocks(cls, query_start_loc: Tensor, seq_lens: Tensor, num_requests: int) -> StepRequests:
        """Requests of attention without a cache."""
        return cls((query_start_loc.data_ptr(), seq_lens.data_ptr(), 0, 0, num_requests), (query_start_loc, seq_lens))

    def seeing(self, visible_ends_T: Tensor) -> StepRequests:
        """These requests, with tokens that see later ones."""
        return replace(self, visible_ends=visible_ends_T)


# Arguments of a KV-cache group that no kernel reads.
NO_REQUESTS = StepRequests((0, 0, 0, 0, 0), ())


@dataclass(frozen=True)
class HeadShape:
    """Parameters of a layer. window: as of `first_visible`. soft_cap, sinks: None for none.

    latent_size: of latent attention: values are the last so many elements of keys; 0 for others.

    collectives: decode context parallel ranks, with runs of `interleave` positions each; None without. block_size:
    positions of a block on this rank.

    slopes: of ALiBi, float32 [H]; None without. biases: by distance; None without.

    bfloat16_layout: order of the products in bfloat16 arithmetic, over a bfloat16 cache; None for float32 arithmetic.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: AttentionSinks | None = None
    collectives: Collectives | None = None
    interleave: int = 1
    latent_size: int = 0
    bfloat16_layout: Bfloat16Layout | None = None
    slopes: Tensor | None = None
    biases: DistanceBiases | None = None

    @property
    def value_size(self) -> int:
        """Elements of a head's output."""
        return self.latent_size or self.head_size

    @property
    def arguments(self) -> tuple[int | float | Tensor | None, ...]:
        """Library arguments of the layer."""
        return *self._constants, None if self.sinks is None else self.sinks.sinks.to(torch.float32), self.slopes

    @cached_property
    def _constants(self) -> tuple[int | float, ...]:
        return (
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.block_size,
            self.window or 0,
            self.latent_size,
            self.scale,
            self.soft_cap or 0.0,
        )

    @property
    def operation(self) -> str:
        """The library's operation over a cache."""
        return "attention" if self.biases is None else "biased_attention"

    @property
    def last_arguments(self) -> tuple[Tensor | int, ...]:
        """Library arguments behind all others: of an operation with biases."""
        if self.biases is None:
            return ()
        biases_HN = self.biases.biases
        return biases_HN, biases_HN.shape[1]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Library arguments of the decode context parallel ranks."""
        return *(_ALONE if self.collectives is None else self.collectives.arguments), self.interleave


class HeadPreparation(NamedTuple):
    """Normalisation and rotary embedding of query and key heads.

    positions_T: int64, contiguous, rows of the rotary table. norm_weight: float32 [H + K, D], None for no norm.
    table_PR: `kernels.rotary.rotary_table`. norm_is_last: heads are rotated before they are normalised.
    """

    positions_T: Tensor
    table_PR: Tensor
    norm_weight: Tensor | None = None
    norm_eps: float = 0.0
    norm_is_last: bool = False

    @property
    def arguments(self) -> tuple[Tensor | float | None, ...]:
        """Library arguments of the preparation."""
        return self.norm_weight, self.norm_eps, self.norm_is_last, self.table_PR, self.table_PR.shape[1] // 2


class NativeAttention:
    """Writes a step's keys and values to the cache, then attends, causally but for `StepRequests.visible_ends`.

    Results have the same bits for any split of a request into steps, any batch, and any number of threads.
    The tensors are float32. The cache is [2, blocks, K, block_size, D] in float32, bfloat16 or int8, where int8 has D +
    4 bytes for a position of a head. Its first half, the keys, is stored as [blocks, K, D, block_size]. The layout of
    int8 is internal to the kernels (`attention_cache.inl`). Latent attention has [1, blocks, 1, block_size, D] in
    float32 or bfloat16, and no values of its own: they are the end of the keys.

    With decode context parallelism all ranks make the same calls, each with its own heads, and exchange data in
    attention; errors as in `Collectives.fail`. Head norms are the same for all ranks' query heads.
    """

    def __init__(self, module: Any, instruction_set: int, types: Mapping[str, OperationType]) -> None:
        self._module = module
        self._index = instruction_set
        self._types = types

    def __call__(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        kv_cache: Tensor,
        requests: StepRequests,
        shape: HeadShape,
    ) -> Tensor:
        """Attention from contiguous heads of each token: [T, H, D]. Padding rows are undefined."""
        out_THD = torch.empty(*query_THD.shape[:2], shape.value_size)
        heads = _rows_of(query_THD), _rows_of(key_TKD), _rows_of(value_TKD), _rows_of(out_THD)
        self._run(*heads, kv_cache, requests, shape, _AS_THEY_ARE, None, _BOTH)
        return out_THD

    @property
    def has_biases(self) -> bool:
        """Whether the library has attention with biases by distance."""
        return "biased_attention" in self._types

    def recorded_read(
        self, query_TX: Tensor, kv_cache: Tensor, requests: TracedRequests, shape: HeadShape
    ) -> Tensor | None:
        """Record attention of traced query heads, [T, H * D], to what the cache holds: [T, H * D].

        None where the library has no such operation.
        """
        if "cross_attention" not in self._types or not isinstance(query_TX, TracedTensor):
            return None
        cache = cache_arguments(kv_cache, shape)
        constants = requests.group, False, *cache, *shape.arguments, *_AS_THEY_ARE, *shape.ranks
        query_TX.origin.keeps_alive.append(kv_cache)
        width = shape.num_heads * shape.value_size
        return query_TX.origin.over_requests("cross_attention", query_TX, width, constants)

    def attend(self, query_THD: Tensor, kv_cache: Tensor, requests: StepRequests, shape: HeadShape) -> Tensor:
        """Attention whose keys and values are in the cache: [T, H, D]. Padding rows are undefined."""
        out_THD = torch.empty(*query_THD.shape[:2], shape.value_size)
        heads = _rows_of(query_THD), _NOTHING, _NOTHING, _rows_of(out_THD)
        self._run(*heads, kv_cache, requests, shape, _AS_THEY_ARE, None, _ATTEND)
        return out_THD

    def write(
        self, key_TKD: Tensor, value_TKD: Tensor, kv_cache: Tensor, requests: StepRequests, shape: HeadShape
    ) -> None:
        """Write the step's keys and values to the cache without attention."""
        heads = _NOTHING, _rows_of(key_TKD), _rows_of(value_TKD), _NOTHING
        self._run(*heads, kv_cache, requests, shape, _AS_THEY_ARE, None, _WRITE)

    def from_projection(
        self,
        qkv_TX: Tensor,
        kv_cache: Tensor,
        requests: StepRequests | TracedRequests,
        shape: HeadShape,
        preparation: HeadPreparation,
    ) -> Tensor:
        """Attention from the output of the QKV projection, [T, (H + 2 * K) * D] with contiguous rows: [T, H * D].

        A traced projection is recorded.
        """
        width = shape.num_heads * shape.value_size
        if isinstance(requests, TracedRequests):
            if not isinstance(qkv_TX, TracedTensor):
                raise Untraceable("attention reads something else than projections of the step's tokens")
            cache, positions_T = cache_arguments(kv_cache, shape), preparation.positions_T
            arguments = *cache, *shape.arguments, *preparation.arguments, *shape.ranks, *shape.last_arguments
            return qkv_TX.origin.attend(
                qkv_TX, width, requests, positions_T, kv_cache, arguments, shape.collectives, shape.operation
            )
        out_TX = torch.empty(qkv_TX.shape[0], width)
        self._run_projection(qkv_TX, out_TX, kv_cache, requests, shape, preparation, _BOTH)
        return out_TX

    def last_from_projection(
        self,
        qkv_TX: Tensor,
        kv_cache: Tensor,
        requests: StepRequests,
        shape: HeadShape,
        preparation: HeadPreparation,
        rows_R: Tensor,
        last_requests: StepRequests | TracedRequests,
    ) -> Tensor:
        """Write keys and values of all tokens, then attend with these rows (int64) only: [R, H * D]."""
        if isinstance(last_requests, TracedRequests):
            return self.from_projection(qkv_TX, kv_cache, last_requests, shape, preparation)
        self._run_projection(qkv_TX, None, kv_cache, requests, shape, preparation, _WRITE)
        of_last = preparation._replace(positions_T=preparation.positions_T.index_select(0, rows_R))
        out_RX = torch.empty(rows_R.shape[0], shape.num_heads * shape.value_size)
        qkv_RX = qkv_TX.index_select(0, rows_R)
        self._run_projection(qkv_RX, out_RX, kv_cache, last_requests, shape, of_last, _ATTEND)
        return out_RX

    def whole_texts(
        self,
        qkv_TX: Tensor,
        requests: StepRequests | TracedRequests,
        shape: HeadShape,
        preparation: HeadPreparation | None,
    ) -> Tensor:
        """Attention in both directions over each request's tokens, without a cache: [T, H * D].

        qkv_TX: as in `from_projection`. shape: its `window` counts the visible positions on either side. preparation:
        None for none. A traced projection is recorded.
        """
        width = shape.num_heads * shape.head_size
        if isinstance(requests, TracedRequests):
            if not isinstance(qkv_TX, TracedTensor):
                raise Untraceable("attention reads something else than projections of the step's tokens")
            prepared = _AS_THEY_ARE if preparation is None else preparation.arguments
            positions_T = None if preparation is None else preparation.positions_T
            constants = *_NO_CACHE, *shape.arguments, *prepared, *shape.ranks
            return qkv_TX.origin.attend_texts(qkv_TX, width, requests, positions_T, constants)
        out_TX = torch.empty(qkv_TX.shape[0], width)
        self._run_projection(qkv_TX, out_TX, None, requests, shape, preparation, _WHOLE_TEXTS)
        return out_TX

    def _run_projection(
        self,
        qkv_TX: Tensor,
        out_TX: Tensor | None,
        kv_cache: Tensor | None,
        requests: StepRequests,
        shape: HeadShape,
        preparation: HeadPreparation | None,
        phase: int,
    ) -> None:
        """Run a phase on the heads of a projection. out_TX: contiguous; None where nothing attends."""
        heads = *_heads_side_by_side(qkv_TX, shape), _NOTHING if out_TX is None else _rows_of(out_TX)
        prepared = _AS_THEY_ARE if preparation is None else preparation.arguments
        positions_T = None if preparation is None else preparation.positions_T
        self._run(*heads, kv_cache, requests, shape, prepared, positions_T, phase)

    def _run(
        self,
        query: tuple[Tensor | int, int],
        key: tuple[Tensor | int, int],
        value: tuple[Tensor | int, int],
        out: tuple[Tensor | int, int],
        kv_cache: Tensor | None,
        requests: StepRequests,
        shape: HeadShape,
        preparation: tuple[Tensor | float | None, ...],
        positions_T: Tensor | None,
        phase: int,
    ) -> None:
        status = self._module.attention(
            self._types[shape.operation].number,
            self._index,
            torch.get_num_threads(),
            *query,
            *key,
            *value,
            *out,
            *requests.arguments,
            positions_T,
            phase,
            0,
            False,
            *(_NO_CACHE if kv_cache is None else cache_arguments(kv_cache, shape)),
            *shape.arguments,
            *preparation,
            *shape.ranks,
            *shape.last_arguments,
            *(() if requests.visible_ends is None else (requests.visible_ends,)),
        )
        if status:
            assert shape.collectives is not None, "no collectives"
            shape.collectives.fail("attention", torch.float32, [shape.num_heads, shape.head_size], status)


def _rows_of(heads: Tensor) -> tuple[Tensor, int]:
    """Address of the first row, and the row stride."""
    return heads, heads.stride(0)


def _heads_side_by_side(qkv_TX: Tensor, shape: HeadShape) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    address, stride = qkv_TX.data_ptr(), qkv_TX.stride(0)
    size = shape.head_size * qkv_TX.element_size()
    key = address + shape.num_heads * size
    value = key if shape.latent_size else key + shape.num_kv_heads * size
    return (address, stride), (key, stride), (value, stride)
