"""The C++ attention, called with tensors.

Suffixes: T tokens of the step, R requests, H query heads, K KV heads, D head size, B blocks per request, X heads side
by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native.meetings import Meetings
from penstock.kernels.native.tracing import Role, TracedRequests, TracedTensor, Untraceable, floats

# Halves of the work that may be done by themselves, as the library knows them.
_BOTH, _WRITE, _ATTEND = 0, 1, 2
# Heads that are neither normalised nor turned; rows that are neither read nor written.
_AS_THEY_ARE = (0, 0.0, 0, 0, 0)
_NOTHING = (0, 0)
# A rank of one, as meetings are told.
_ALONE = (0, 0, 1, 0, 0, 0)
# What the cache may be kept in, and how the library knows it.
CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def cache_arguments(kv_cache: Tensor) -> tuple[int, int, int, int]:
    """As the library takes it: [2, blocks, K, ...] of one of `CACHE_TYPES`, wherever the values lie.

    The heads of all blocks must follow one another at equal distances.
    """
    size, keys = kv_cache.element_size(), kv_cache.data_ptr()
    return keys, keys + kv_cache.stride(0) * size, kv_cache.stride(2) * size, CACHE_TYPES[kv_cache.dtype]


@dataclass(frozen=True, slots=True)
class StepRequests:
    """Which tokens and blocks a step's requests have, as the library takes it; one for all layers of a group.

    query_start_loc: int32 [R + 1] or more. seq_lens: int32 [R] or more. block_table: int32 [R, B], contiguous rows.
    """

    arguments: tuple[int, ...]
    keeps_alive: tuple[Tensor, ...]

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


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a layer computes. sliding_window, soft_cap: None for none.

    meetings: of ranks that keep the positions by turns, `interleave` in a row; None where all are here. block_size: of
    those positions that are here.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    meetings: Meetings | None = None
    interleave: int = 1

    @property
    def arguments(self) -> tuple[int | float, ...]:
        """As the library takes it."""
        return (
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.block_size,
            self.sliding_window or 0,
            self.scale,
            self.soft_cap or 0.0,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who keeps positions, as the library takes it."""
        return *(_ALONE if self.meetings is None else self.meetings.arguments), self.interleave


class NativeAttention:
    """Writes a step's keys and values to the cache, then attends causally.

    Results have the same bits however a request is cut into steps, whatever else runs, on any number of threads.
    The tensors are float32. The cache is [2, blocks, K, block_size, D] in float32, bfloat16 or int8, where int8 has
    D + 4 bytes for a position of a head. Its first half, the keys, is really [blocks, K, D, block_size]. How int8 lies
    is the kernels' own matter (`attention_cache.inl`).

    Where ranks keep positions by turns, all make the same calls, each with its own heads; whoever attends meets the
    others, which raises as `Meetings.fail`. Head norms are the same for all ranks' query heads.
    """

    def __init__(self, module: Any, instruction_set: int) -> None:
        self._module = module
        self._index = instruction_set

    def __call__(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        kv_cache: Tensor,
        requests: StepRequests,
        shape: HeadShape,
        *,
        is_written: bool = False,
    ) -> Tensor:
        """[T, H, D] from heads that lie side by side in their token. Rows of padding are anything.

        is_written: the keys and values are in the cache already; those given are not read.
        """
        out_THD = torch.empty(query_THD.shape)
        self._run(
            _rows_of(query_THD),
            _rows_of(key_TKD),
            _rows_of(value_TKD),
            _rows_of(out_THD),
            kv_cache,
            requests,
            shape,
            _AS_THEY_ARE,
            _ATTEND if is_written else _BOTH,
        )
        return out_THD

    def write(
        self, key_TKD: Tensor, value_TKD: Tensor, kv_cache: Tensor, requests: StepRequests, shape: HeadShape
    ) -> None:
        """Write the step's keys and values, and attend to nothing."""
        keys, values = _rows_of(key_TKD), _rows_of(value_TKD)
        self._run(_NOTHING, keys, values, _NOTHING, kv_cache, requests, shape, _AS_THEY_ARE, _WRITE)

    def from_projection(
        self,
        qkv_TX: Tensor,
        kv_cache: Tensor,
        requests: StepRequests,
        shape: HeadShape,
        *,
        norm: tuple[Tensor, float] | None,
        rotation: tuple[int, int, int] | None,
        is_written: bool = False,
    ) -> Tensor:
        """[T, H * D] from query, key and value heads side by side: [T, (H + 2 * K) * D], rows contiguous.

        norm: RMSNorm of each query and key head, weight [H + K, D] and epsilon. rotation: `TableRotation.arguments`.
        is_written: as in `__call__`.
        """
        out_TX = torch.empty(qkv_TX.shape[0], shape.num_heads * shape.head_size)
        heads, phase = _heads_side_by_side(qkv_TX, shape), _ATTEND if is_written else _BOTH
        self._run(*heads, _rows_of(out_TX), kv_cache, requests, shape, _preparation(norm, rotation), phase)
        return out_TX

    def trace_from_projection(
        self,
        qkv_TX: Tensor,
        kv_cache: Tensor,
        requests: TracedRequests,
        shape: HeadShape,
        *,
        norm: tuple[Tensor, float] | None,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """`from_projection` as part of a program. rotation: the table, and which rows of it tokens take."""
        table_PR, positions_T = rotation
        if not isinstance(qkv_TX, TracedTensor) or getattr(positions_T, "role", None) is not Role.POSITIONS:
            raise Untraceable("attention reads something else than projections of the step's tokens")
        weight, eps = (None, 0.0) if norm is None else norm
        return qkv_TX.origin.attend(
            qkv_TX,
            shape.num_heads * shape.head_size,
            requests,
            kv_cache,
            *cache_arguments(kv_cache),
            *shape.arguments,
            floats(weight),
            eps,
            table_PR,
            table_PR.shape[1] // 2,
            *shape.ranks,
            meetings=shape.meetings,
        )

    def write_from_projection(
        self,
        qkv_TX: Tensor,
        kv_cache: Tensor,
        requests: StepRequests,
        shape: HeadShape,
        *,
        norm: tuple[Tensor, float] | None,
        rotation: tuple[int, int, int] | None,
    ) -> None:
        """Write the keys and values that `from_projection` would, and attend to nothing."""
        heads = _heads_side_by_side(qkv_TX, shape)
        self._run(*heads, _NOTHING, kv_cache, requests, shape, _preparation(norm, rotation), _WRITE)

    def _run(
        self,
        query: tuple[int, int],
        key: tuple[int, int],
        value: tuple[int, int],
        out: tuple[int, int],
        kv_cache: Tensor,
        requests: StepRequests,
        shape: HeadShape,
        preparation: tuple[int | float, ...],
        phase: int,
    ) -> None:
        status = self._module.attention(
            self._index,
            *query,
            *key,
            *value,
            *cache_arguments(kv_cache),
            *requests.arguments,
            *out,
            *shape.arguments,
            *preparation,
            phase,
            torch.get_num_threads(),
            *shape.ranks,
        )
        if status:
            assert shape.meetings is not None, "no others meet"
            shape.meetings.fail("attention", torch.float32, [shape.num_heads, shape.head_size], status)


def _rows_of(heads: Tensor) -> tuple[int, int]:
    """The address of the first row, and how far rows are apart."""
    return heads.data_ptr(), heads.stride(0)


def _heads_side_by_side(qkv_TX: Tensor, shape: HeadShape) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    address, stride = _rows_of(qkv_TX)
    size = shape.head_size * qkv_TX.element_size()
    key = address + shape.num_heads * size
    return (address, stride), (key, stride), (key + shape.num_kv_heads * size, stride)


def _preparation(norm: tuple[Tensor, float] | None, rotation: tuple[int, int, int] | None) -> tuple[int | float, ...]:
    weight = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    return *weight, *(rotation or (0, 0, 0))
