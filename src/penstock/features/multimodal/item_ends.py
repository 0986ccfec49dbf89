"""Tokens of an item that see one another in both directions (Gemma 3, https://arxiv.org/abs/2503.19786)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from penstock.attention import AttentionBackend
from penstock.contract import part_of
from penstock.device import Device
from penstock.errors import UnsupportedFeature
from penstock.features.multimodal.messages import ScheduledRows, StepMediaPart
from penstock.kernels.paged_attention import VISIBLE_ENDS
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.slot_owner import SlotOwner
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput


class ItemEnds(SlotOwner):
    """End of the positions that each token sees, in steps with items that may not be cut: for their tokens that of the
    run.

    A step has a run's last token if it has any. A run that a prefix hit has cut begins later; the keys before it are
    cached.
    """

    step_inputs = (StepInput(VISIBLE_ENDS, torch.int32),)

    def __init__(self, device: Device) -> None:
        self._device = device

    def use_kv_cache(self, kv_cache: PagedKVCache) -> None:
        """Raise UnsupportedFeature for a KV cache whose attention is always causal."""
        for group in kv_cache.groups:
            backend = group.backend
            if isinstance(backend, AttentionBackend) and not backend.sees_later_tokens:
                raise UnsupportedFeature(
                    "Tokens of an image see one another in this model, and the attention backend "
                    f"{backend.name} lets none see later ones. Start with another attention_backend, such as "
                    "reference, or with language_model_only for prompts of text."
                )

    def has_work(self, frame: Frame) -> bool:
        return any(not one.may_cut for _, one in rows_of(frame))

    def fill(self, frame: Frame) -> None:
        num_tokens = frame.batch.layout.plan.num_tokens
        last_np = np.arange(num_tokens)
        for first, one in rows_of(frame):
            if not one.may_cut:
                last_np[first : first + one.count] = first + one.count - 1
        last_positions_T = frame.batch.positions[:num_tokens].index_select(0, self._device.upload(last_np))
        frame.inputs.named[VISIBLE_ENDS][:num_tokens] = last_positions_T + 1


def rows_of(frame: Frame) -> Iterator[tuple[int, ScheduledRows]]:
    """The step's rows of features, each with its first token in the step; without requests that ended with an error."""
    part = part_of(frame.output.parts, StepMediaPart)
    if part is None:
        return
    layout = frame.batch.layout
    starts = dict(zip(layout.req_ids, layout.query_start_loc_np.tolist(), strict=False))
    for one in part.rows:
        if one.req_id not in frame.errors:
            yield starts[one.req_id] + one.token, one
