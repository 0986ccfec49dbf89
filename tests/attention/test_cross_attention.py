"""Cross attention as a backend of its own: encoder positions are written once, and all of them are read by each token.

Suffixes: E encoder positions, T tokens of the step, H heads, D head size.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.attention import AttentionStep, BoundLayer, ForwardContext, Heads, LayerAttention, StepGeometry
from penstock.attention.token_major import TokenMajorBackend
from penstock.contract import FullAttentionSpec

BLOCK_SIZE, NUM_HEADS, HEAD_SIZE = 4, 2, 8
LAYER = LayerAttention("decoder.0.cross", NUM_HEADS, NUM_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5)
LENGTHS = (7, 3)


class CrossBackend(TokenMajorBackend):
    """Keys and values are those of the encoder's positions; a step without new ones has rows of none."""

    name = "cross"

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        return None

    def place(self, geometry: StepGeometry) -> StepGeometry:
        """Lengths and slots of the encoder's positions, which lie in the requests' blocks from the first on."""
        slots = [
            int(table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for table, length in zip(geometry.block_table, LENGTHS, strict=True)
            for position in range(length)
        ]
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        return replace(geometry, seq_lens=lengths, slot_mapping=torch.tensor(slots), num_actual_tokens=len(slots))

    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        if len(key_TKD):
            super().write(step, key_TKD, value_TKD)

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        geometry, output_THD = step.metadata, torch.empty_like(query_THD)
        for request, (begin, end) in enumerate(itertools.pairwise(geometry.query_start_loc_np.tolist())):
            blocks, length = geometry.block_table[request], int(geometry.seq_lens[request])
            key_EHD, value_EHD = (part[blocks].flatten(0, 1)[:length] for part in step.kv_cache)
            output_THD[begin:end] = attend(query_THD[begin:end], key_EHD, value_EHD)
        return output_THD


def attend(query_THD: Tensor, key_EHD: Tensor, value_EHD: Tensor) -> Tensor:
    scores_HTE = torch.einsum("thd,ehd->hte", query_THD, key_EHD) * LAYER.scale
    return torch.einsum("hte,ehd->thd", scores_HTE.softmax(-1), value_EHD)


def step_of(counts: tuple[int, int]) -> StepGeometry:
    starts = np.array([0, *itertools.accumulate(counts)])
    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    zeros = torch.zeros(sum(counts), dtype=torch.int64)
    lengths = torch.tensor(counts, dtype=torch.int32)
    sizes = {"num_actual_tokens": sum(counts), "num_actual_reqs": 2, "max_query_len": max(counts)}
    return StepGeometry(
        query_start_loc=torch.from_numpy(starts).int(), query_start_loc_np=starts, seq_lens=lengths,
        max_seq_len_upper_bound=8, block_table=table, slot_mapping=zeros, block_size=BLOCK_SIZE, **sizes,
    )  # fmt: skip


def test_encoder_positions_are_written_once_and_read_in_every_step() -> None:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype="float32")
    backend = CrossBackend(LAYER)
    cache = backend.view_pages(torch.zeros(5, spec.page_size_bytes, dtype=torch.uint8), spec)
    layers = {LAYER.name: BoundLayer(0, backend, cache)}
    generator = torch.Generator().manual_seed(0)
    key_EHD, value_EHD = torch.randn(2, sum(LENGTHS), NUM_HEADS, HEAD_SIZE, generator=generator)
    for counts, is_first in (((2, 5), True), ((1, 1), False)):
        query_THD = torch.randn(sum(counts), NUM_HEADS, HEAD_SIZE, generator=generator)
        new = slice(None) if is_first else slice(0)
        context = ForwardContext(layers, [backend.make_metadata(backend.place(step_of(counts)))])
        found_THD = context.attend(LAYER, Heads(query_THD, key_EHD[new], value_EHD[new]))
        parts = zip(query_THD.split(counts), key_EHD.split(LENGTHS), value_EHD.split(LENGTHS), strict=True)
        torch.testing.assert_close(found_THD, torch.cat([attend(*part) for part in parts]))
