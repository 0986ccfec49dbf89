"""An attention backend whose uniform steps depend on tensors alone, padding rows included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.attention import AttentionStep
from penstock.attention.reference import ReferenceBackend
from penstock.attention.select import BACKENDS
from penstock.kernels.paged_attention import paged_attention_reference
from support.recording_device import RecordingDevice


class PaddedBackend(ReferenceBackend):
    name = "padded"
    keeps_metadata = True
    is_capturable = True

    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        kv_cache, metadata = step.kv_cache, step.metadata
        slots_T, block_size = metadata.slot_mapping, metadata.block_size
        for row, slot in enumerate(slots_T.tolist()):
            if slot >= 0:
                kv_cache[0, slot // block_size, slot % block_size] = key_TKD[row].to(kv_cache.dtype)
                kv_cache[1, slot // block_size, slot % block_size] = value_TKD[row].to(kv_cache.dtype)

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        layer, kv_cache, metadata = step.layer, step.kv_cache, step.metadata
        starts = torch.arange(len(query_THD) + 1) if metadata.max_query_len == 1 else metadata.query_start_loc
        num_rows = len(starts) - 1
        return paged_attention_reference(
            query_THD,
            kv_cache[0],
            kv_cache[1],
            metadata.block_table[:num_rows],
            starts,
            metadata.seq_lens[:num_rows],
            metadata.max_query_len,
            layer.scale,
            layer.window,
            layer.soft_cap,
            layer.sink_values,
            ends_T=step.visible_ends,
        )


def use_graphs(monkeypatch: pytest.MonkeyPatch, device: RecordingDevice | None = None) -> RecordingDevice:
    """Let engines of this process run on a device that captures graphs, with `PaddedBackend` to choose. Returns it."""
    found = device or RecordingDevice()
    monkeypatch.setitem(BACKENDS, PaddedBackend.name, PaddedBackend)
    monkeypatch.setattr("penstock.worker.worker.create_device", lambda *_, **__: found)
    return found
