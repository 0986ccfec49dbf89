"""Decode context parallelism on the CPU, in torch: the KV cache of the same KV heads is sharded by position.

Each rank attends to its own positions with the query heads of all ranks, and the partial results are merged by their
log-sum-exp. Block ids are the same on all ranks, so the scheduler sees one cache, with blocks of the positions of all
ranks. Pages are laid out as in `cpu_paged`. `cpu_native` is the faster version, for the C++ kernels and ranks with
shared memory.
"""

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
    decode_attention_part,
    first_visible,
    list_blocks_between,
    prefill_attention_part,
    weigh_part,
    write_kv_rows,
)
from penstock.parallel.context_share import ContextShare


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """Decode requests with visible positions on this rank. rows: int64, their tokens."""

    rows: Tensor
    blocks: DecodeBlocks


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """One request's tokens start..stop of the step. first, end: int64, visible range in `block_ids` of each token."""

    start: int
    stop: int
    first: Tensor
    end: Tensor
    block_ids: Tensor


@dataclass(frozen=True, slots=True)
class CpuContextMetadata:
    """own: int64, tokens whose keys and values this rank keeps. kv_rows: their rows in the cache."""

    num_tokens: int
    own: Tensor
    kv_rows: Tensor
    decodes: DecodeParts | None
    prefills: list[PrefillPart]


class CpuContextBackend(HeadMajorBackend):
    name = "cpu_context"
    shares_positions = True

    def __init__(self, layer: LayerAttention) -> None:
        super().__init__(layer)
        assert layer.context is not None, "used with decode context parallelism only"
        self._share: ContextShare = layer.context

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if layer.context is None:
            return "it needs decode_context_parallel_size of more than 1"
        return super().why_not(layer, dtype, device, block_size)

    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        return keys_then_values(
            pages_NX, spec.dtype, spec.num_kv_heads, spec.positions_per_page, spec.elements_per_head
        )

    def make_metadata(self, geometry: StepGeometry) -> CpuContextMetadata:
        num_reqs, num_tokens = geometry.num_actual_reqs, geometry.num_actual_tokens
        lengths = geometry.seq_lens[:num_reqs].numpy().astype("int64")
        starts = geometry.query_start_loc_np[: num_reqs + 1]
        table = geometry.block_table.numpy()
        num_decodes = int((starts[1:] - starts[:-1] == 1).sum())
        page = geometry.block_size // self._share.group.size
        own, slots = self._share.slots(geometry.slot_mapping.numpy()[:num_tokens], geometry.block_size)
        prefills = [
            self._prefill(table[i], int(starts[i]), int(starts[i + 1]), int(lengths[i]), page)
            for i in range(num_decodes, num_reqs)
        ]
        return CpuContextMetadata(
            num_tokens=num_tokens,
            own=torch.from_numpy(own),
            kv_rows=torch.from_numpy(write_kv_rows(slots, page, self.num_kv_heads)),
            decodes=self._decodes(table, lengths[:num_decodes], page),
            prefills=[prefill for prefill in prefills if len(prefill.block_ids)],
        )

    def _seen(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Visible local positions of queries at these positions: first, and end (exclusive)."""
        end = self._share.num_kept(positions + 1)
        return self._share.num_kept(first_visible(positions, self.window)), end

    def _decodes(self, table: np.ndarray, lengths: np.ndarray, page: int) -> DecodeParts | None:
        first, end = self._seen(lengths - 1)
        (rows,) = np.nonzero(end > first)
        if not len(rows):
            return None
        return DecodeParts(torch.from_numpy(rows), list_blocks_between(table[rows], first[rows], end[rows], page))

    def _prefill(self, table_row: np.ndarray, start: int, stop: int, length: int, page: int) -> PrefillPart:
        first, end = self._seen(np.arange(length - (stop - start), length))
        first_block = int(first[0]) // page
        block_ids = torch.from_numpy(table_row[first_block : -(-int(end[-1]) // page)].astype("int64"))
        skipped = first_block * page
        return PrefillPart(start, stop, torch.from_numpy(first - skipped), torch.from_numpy(end - skipped), block_ids)

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        output_THD = torch.zeros_like(query_THD, memory_format=torch.contiguous_format)
        num_tokens = step.metadata.num_tokens
        if num_tokens == 0:
            return output_THD
        group = self._share.group
        part_THD, lse_TH = self._attend_here(step, group.all_gather(query_THD[:num_tokens], 1))
        weighed_THD = weigh_part(part_THD, lse_TH, group.all_gather(lse_TH.unsqueeze(0), 0))
        output_THD[:num_tokens] = group.reduce_scatter(weighed_THD, 1)
        return output_THD

    def _attend_here(self, step: AttentionStep, query_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to local positions with the query heads of all ranks: float32 [T, H, D], and log-sum-exp [T, H]."""
        layer, metadata = step.layer, step.metadata
        key_cache, value_cache = step.kv_cache[0], step.kv_cache[1]
        output_THD = query_THD.new_zeros(query_THD.shape, dtype=torch.float32)
        lse_TH = output_THD.new_full(query_THD.shape[:2], float("-inf"))
        decodes = metadata.decodes
        if decodes is not None:
            workspace = self.workspace_for(key_cache, decodes.blocks.block_ids_N.shape[0])
            query_RHD = query_THD.index_select(0, decodes.rows)
            output_THD[decodes.rows], lse_TH[decodes.rows] = decode_attention_part(
                query_RHD, key_cache, value_cache, decodes.blocks, layer.scale, workspace, layer.soft_cap
            )
        for prefill in metadata.prefills:
            rows = slice(prefill.start, prefill.stop)
            output_THD[rows], lse_TH[rows] = prefill_attention_part(
                query_THD[rows],
                gather_blocks(key_cache, prefill.block_ids),
                gather_blocks(value_cache, prefill.block_ids),
                prefill.first,
                prefill.end,
                layer.scale,
                layer.soft_cap,
            )
        return output_THD, lse_TH

    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        own = step.metadata.own
        self.write_rows(step, key_TKD.index_select(0, own), value_TKD.index_select(0, own))
