"""CPU backend in torch: batched decodes, and prefills one request at a time. Nothing is padded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.attention.base import StepGeometry, keys_then_values
from penstock.attention.head_major import HeadMajorBackend, gather_blocks
from penstock.attention.step import AttentionStep, LayerAttention
from penstock.contract import AttentionSpec
from penstock.kernels.paged_attention import (
    DecodeBlocks,
    decode_attention_cpu,
    first_visible,
    list_decode_blocks,
    prefill_attention_cpu,
    write_kv_rows,
)

# Bytes of keys, and of values, that one batch of decodes gathers at once: about the size of the CPU caches.
_MAX_BYTES_AT_ONCE = 8 << 20


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Requests start..stop of the step, one token each."""

    start: int
    stop: int
    blocks: DecodeBlocks


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens start..stop of one request; `block_ids` hold `num_positions` visible ones, from `first_position` on."""

    start: int
    stop: int
    first_position: int
    num_positions: int
    block_ids: Tensor


@dataclass(frozen=True, slots=True)
class CpuPagedMetadata:
    num_tokens: int
    kv_rows: Tensor
    decodes: list[DecodeBatch]
    prefills: list[Prefill]


class CpuPagedBackend(HeadMajorBackend):
    name = "cpu_paged"

    def __init__(self, layer: LayerAttention) -> None:
        super().__init__(layer)
        self._bytes_per_position = 4 * layer.num_kv_heads * layer.head_size

    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        return keys_then_values(pages_NX, spec.dtype, spec.num_kv_heads, spec.block_size, spec.elements_per_head)

    def make_metadata(self, geometry: StepGeometry) -> CpuPagedMetadata:
        # On the CPU lengths are exact, and reading them does not wait.
        num_reqs = geometry.num_actual_reqs
        seq_lens = geometry.seq_lens[:num_reqs].numpy().astype("int64")
        starts = geometry.query_start_loc_np[: num_reqs + 1]
        table = geometry.block_table.numpy()
        num_decodes = int((starts[1:] - starts[:-1] == 1).sum())
        num_tokens = geometry.num_actual_tokens
        return CpuPagedMetadata(
            num_tokens=num_tokens,
            kv_rows=torch.from_numpy(
                write_kv_rows(geometry.slot_mapping.numpy()[:num_tokens], geometry.block_size, self.num_kv_heads)
            ),
            decodes=self._decode_batches(table, seq_lens, num_decodes, geometry.block_size),
            prefills=[
                self._prefill(table[i], int(starts[i]), int(starts[i + 1]), int(seq_lens[i]), geometry.block_size)
                for i in range(num_decodes, num_reqs)
            ],
        )

    def _decode_batches(
        self, table: np.ndarray, seq_lens: np.ndarray, num_decodes: int, block_size: int
    ) -> list[DecodeBatch]:
        batches = []
        most = max(1, _MAX_BYTES_AT_ONCE // (self._bytes_per_position * block_size))
        for start, stop in _split_by_blocks(seq_lens[:num_decodes], block_size, most):
            blocks = list_decode_blocks(table[start:stop], seq_lens[start:stop], block_size, self.window)
            batches.append(DecodeBatch(start, stop, blocks))
        return batches

    def _prefill(self, table_row: np.ndarray, start: int, stop: int, seq_len: int, block_size: int) -> Prefill:
        first_block = int(first_visible(np.array(seq_len - (stop - start)), self.window)) // block_size
        block_ids = torch.from_numpy(table_row[first_block : -(-seq_len // block_size)].astype("int64"))
        first_position = first_block * block_size
        return Prefill(start, stop, first_position, seq_len - first_position, block_ids)

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        layer, metadata = step.layer, step.metadata
        if metadata.num_tokens == 0:
            return torch.zeros_like(query_THD)
        key_cache, value_cache = step.kv_cache[0], step.kv_cache[1]
        output_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        for batch in metadata.decodes:
            workspace = self.workspace_for(key_cache, batch.blocks.block_ids_N.shape[0])
            output_THD[batch.start : batch.stop] = decode_attention_cpu(
                query_THD[batch.start : batch.stop],
                key_cache,
                value_cache,
                batch.blocks,
                layer.scale,
                workspace,
                layer.soft_cap,
                layer.sink_values,
            )
        for prefill in metadata.prefills:
            rows = slice(prefill.start, prefill.stop)
            key_LKD = gather_blocks(key_cache, prefill.block_ids)[: prefill.num_positions]
            value_LKD = gather_blocks(value_cache, prefill.block_ids)[: prefill.num_positions]
            output_THD[rows] = prefill_attention_cpu(
                query_THD[rows],
                key_LKD.to(query_THD.dtype),
                value_LKD.to(query_THD.dtype),
                layer.scale,
                layer.window,
                layer.soft_cap,
                layer.sink_values,
                first_position=prefill.first_position,
            )
        output_THD[metadata.num_tokens :] = 0
        return output_THD

    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        rows = slice(step.metadata.num_tokens)
        self.write_rows(step, key_TKD[rows], value_TKD[rows])


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
