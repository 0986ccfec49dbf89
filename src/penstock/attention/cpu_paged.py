"""CPU backend in torch: batched decodes, and prefills one request at a time. Nothing is padded.

Its cache is head-major, [2, num_blocks, K, positions, D]: a block of one head is a matrix. In memory a block's values
follow its keys.

With decode context parallelism the KV cache of the same KV heads is sharded by position: each rank attends to its own
positions with the query heads of all ranks, and the partial results are merged by their log-sum-exp. Block ids are the
same on all ranks, so the scheduler sees one cache, with blocks of the positions of all ranks.

`cpu_native` is the faster version, for the C++ kernels and ranks with shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.attention.base import AttentionBackend, StepGeometry, keys_then_values
from penstock.attention.step import AttentionStep, LayerAttention
from penstock.contract import AttentionSpec
from penstock.kernels.paged_attention import (
    DecodeBlocks,
    decode_attention_part,
    first_visible,
    list_blocks_between,
    prefill_attention_cpu,
    prefill_attention_part,
    weigh_part,
    weigh_sinks,
    write_kv_rows,
)
from penstock.parallel.group import Group

# Bytes of keys, and of values, that one batch of decodes gathers at once: about the size of the CPU caches.
_MAX_BYTES_AT_ONCE = 8 << 20


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Decode requests with visible positions on this rank. rows: int64, their tokens."""

    rows: Tensor
    blocks: DecodeBlocks


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill of a request: its tokens start..stop of the step, and blocks with their visible positions on this rank.

    first_position: of the first block. first, end: int64, visible range of each token, counted from there.
    """

    start: int
    stop: int
    first_position: int
    first: Tensor
    end: Tensor
    block_ids: Tensor


@dataclass(frozen=True, slots=True)
class CpuPagedMetadata:
    """own: int64, tokens whose keys and values this rank keeps. kv_rows: their rows in the cache."""

    num_tokens: int
    own: Tensor
    kv_rows: Tensor
    decodes: list[DecodeBatch]
    prefills: list[Prefill]


class CpuPagedBackend(AttentionBackend):
    name = "cpu_paged"
    shares_positions = True
    sees_later_tokens = True

    def __init__(self, layer: LayerAttention) -> None:
        super().__init__(layer)
        self._share = layer.context
        self._bytes_per_position = 4 * layer.num_kv_heads * layer.head_size
        self._workspace: tuple[Tensor, Tensor] | None = None

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return f"it does not support a {dtype} KV cache"
        return None if device.type == "cpu" else "it runs on the CPU only"

    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        return keys_then_values(
            pages_NX, spec.dtype, spec.num_kv_heads, spec.positions_per_page, spec.elements_per_head
        )

    def make_metadata(self, geometry: StepGeometry) -> CpuPagedMetadata:
        # On the CPU lengths are exact, and reading them does not wait.
        num_reqs, num_tokens = geometry.num_actual_reqs, geometry.num_actual_tokens
        lengths = geometry.seq_lens[:num_reqs].numpy().astype("int64")
        starts = geometry.query_start_loc_np[: num_reqs + 1]
        table = geometry.block_table.numpy()
        num_decodes = int((starts[1:] - starts[:-1] == 1).sum())
        slots = geometry.slot_mapping.numpy()[:num_tokens]
        own, page = np.arange(num_tokens), geometry.block_size
        if self._share is not None:
            own, slots = self._share.slots(slots, geometry.block_size)
            page //= self._share.group.size
        prefills = [
            self._prefill(table[i], int(starts[i]), int(starts[i + 1]), int(lengths[i]), page)
            for i in range(num_decodes, num_reqs)
        ]
        return CpuPagedMetadata(
            num_tokens=num_tokens,
            own=torch.from_numpy(own),
            kv_rows=torch.from_numpy(write_kv_rows(slots, page, self.num_kv_heads)),
            decodes=list(self._decodes(table, lengths[:num_decodes], page)),
            prefills=[prefill for prefill in prefills if len(prefill.block_ids)],
        )

    def _seen(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Visible positions on this rank of queries at these positions: first, and end (exclusive)."""
        first, end = first_visible(positions, self.window), positions + 1
        return (first, end) if self._share is None else (self._share.num_kept(first), self._share.num_kept(end))

    def _decodes(self, table: np.ndarray, lengths: np.ndarray, page: int) -> Iterator[DecodeBatch]:
        first, end = self._seen(lengths - 1)
        (rows,) = np.nonzero(end > first)
        most = max(1, _MAX_BYTES_AT_ONCE // (self._bytes_per_position * page))
        for start, stop in _split_by_blocks(end[rows], page, most):
            some = rows[start:stop]
            blocks = list_blocks_between(table[some], first[some], end[some], page)
            yield DecodeBatch(torch.from_numpy(some), blocks)

    def _prefill(self, table_row: np.ndarray, start: int, stop: int, length: int, page: int) -> Prefill:
        first, end = self._seen(np.arange(length - (stop - start), length))
        first_block = int(first[0]) // page
        block_ids = torch.from_numpy(table_row[first_block : -(-int(end[-1]) // page)].astype("int64"))
        skipped = first_block * page
        return Prefill(
            start, stop, skipped, torch.from_numpy(first - skipped), torch.from_numpy(end - skipped), block_ids
        )

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        output_THD = torch.zeros_like(query_THD, memory_format=torch.contiguous_format)
        num_tokens = step.metadata.num_tokens
        if num_tokens:
            attended_THD = output_THD[:num_tokens]
            if self._share is None:
                self._attend(step, query_THD[:num_tokens], attended_THD)
            else:
                attended_THD.copy_(self._attend_together(step, query_THD[:num_tokens], self._share.group))
        return output_THD

    def _attend(self, step: AttentionStep, query_THD: Tensor, output_THD: Tensor) -> None:
        """Attend to all positions."""
        layer, metadata = step.layer, step.metadata
        for batch in metadata.decodes:
            part_RHD, lse_RH = self._decode(step, query_THD, batch)
            output_THD[batch.rows] = weigh_sinks(part_RHD, lse_RH, layer.sink_values).to(query_THD.dtype)
        for prefill in metadata.prefills:
            rows = slice(prefill.start, prefill.stop)
            key_LKD, value_LKD = _gathered(step, prefill)
            num_positions = int(prefill.end[-1])
            output_THD[rows] = prefill_attention_cpu(
                query_THD[rows],
                key_LKD[:num_positions].to(query_THD.dtype),
                value_LKD[:num_positions].to(query_THD.dtype),
                layer.scale,
                layer.window,
                layer.soft_cap,
                layer.sink_values,
                first_position=prefill.first_position,
                end_Q=None if step.visible_ends is None else self._ends(step.visible_ends, prefill),
            )

    def _attend_together(self, step: AttentionStep, query_THD: Tensor, group: Group) -> Tensor:
        """Attend to the positions of all ranks of the group, with this rank's query heads."""
        layer, metadata = step.layer, step.metadata
        query_THD = group.all_gather(query_THD, 1)
        output_THD = query_THD.new_zeros(query_THD.shape, dtype=torch.float32)
        lse_TH = output_THD.new_full(query_THD.shape[:2], float("-inf"))
        for batch in metadata.decodes:
            output_THD[batch.rows], lse_TH[batch.rows] = self._decode(step, query_THD, batch)
        for prefill in metadata.prefills:
            rows = slice(prefill.start, prefill.stop)
            end_Q = prefill.end if step.visible_ends is None else self._ends(step.visible_ends, prefill)
            output_THD[rows], lse_TH[rows] = prefill_attention_part(
                query_THD[rows], *_gathered(step, prefill), prefill.first, end_Q, layer.scale, layer.soft_cap
            )
        weighed_THD = weigh_part(output_THD, lse_TH, group.all_gather(lse_TH.unsqueeze(0), 0))
        return group.reduce_scatter(weighed_THD, 1)

    def _ends(self, visible_ends_T: Tensor, prefill: Prefill) -> Tensor:
        """`Prefill.end` of tokens of which some see later ones."""
        end_Q = visible_ends_T[prefill.start : prefill.stop].numpy().astype("int64")
        own_Q = end_Q if self._share is None else self._share.num_kept(end_Q)
        return torch.from_numpy(own_Q - prefill.first_position)

    def _decode(self, step: AttentionStep, query_THD: Tensor, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """Attend to this rank's positions: float32 [R, H, D], and log-sum-exp [R, H]."""
        keys, values = step.kv_cache[0], step.kv_cache[1]
        workspace = self._workspace_for(keys, batch.blocks.block_ids_N.shape[0])
        query_RHD, layer = query_THD.index_select(0, batch.rows), step.layer
        return decode_attention_part(query_RHD, keys, values, batch.blocks, layer.scale, workspace, layer.soft_cap)

    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        kv_cache, head_size, metadata = step.kv_cache, step.layer.head_size, step.metadata
        # A block is the keys of all heads, then the values.
        rows_XD = kv_cache.transpose(0, 1).view(-1, head_size)
        for row_ids, new_TKD in zip(metadata.kv_rows.to(kv_cache.device), (key_TKD, value_TKD), strict=True):
            own_TKD = new_TKD.index_select(0, metadata.own)
            rows_XD.index_copy_(0, row_ids, own_TKD.reshape(-1, head_size).to(kv_cache.dtype))

    def _workspace_for(self, cache_BKPD: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return two tensors like the cache, of at least `num_blocks` blocks; shared by all layers of the group."""
        if self._workspace is None or self._workspace[0].shape[0] < num_blocks:
            shape = (num_blocks + num_blocks // 4, *cache_BKPD.shape[1:])
            self._workspace = (cache_BKPD.new_empty(shape), cache_BKPD.new_empty(shape))
        return self._workspace


def _gathered(step: AttentionStep, prefill: Prefill) -> tuple[Tensor, Tensor]:
    """Keys and values of all positions of a prefill's blocks: [L, K, D] each."""
    keys, values = (cache.index_select(0, prefill.block_ids).transpose(1, 2).flatten(0, 1) for cache in step.kv_cache)
    return keys, values


def _split_by_blocks(seq_lens: np.ndarray, block_size: int, most: int) -> list[tuple[int, int]]:
    """Split requests into runs of at most `most` blocks (or one request, if it is longer)."""
    num_reqs = len(seq_lens)
    if num_reqs == 0:
        return []
    ends = (-(-seq_lens // block_size)).cumsum()
    if ends[-1] <= most:
        return [(0, num_reqs)]
    runs, start = [], 0
    while start < num_reqs:
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(ends.searchsorted(before + most, side="right")))
        runs.append((start, stop))
        start = stop
    return runs
