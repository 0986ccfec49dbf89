"""Draft heads on the target's hidden states: EAGLE, EAGLE-3, MTP.

Suffixes: T tokens, R requests of the step, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import SpeculativeConfig
from penstock.device import Device
from penstock.kernels.bound_step import StepOutcome
from penstock.models.draft_head import DraftHead
from penstock.models.interface import ModelInputs
from penstock.runner.speculative.model_drafter import MOST_WAITING, ModelDrafter
from penstock.runner.speculative.speculator import SpeculatorServices
from penstock.step.batch import InputBatch
from penstock.step.frame import Frame


class DraftingHead(ModelDrafter):
    """A head that reads, at each position, the target's hidden state and the next token.

    It reads all tokens of a step again, because its drafts were made from its own hidden states. At rejected drafts its
    input is wrong, and its output is never used. Postponed tokens are kept with their hidden states.
    """

    reads_ahead = 1
    needs_hidden = True

    def __init__(self, model: DraftHead, config: SpeculativeConfig, vocab_size: int, device: Device) -> None:
        super().__init__(model, config, vocab_size, device)
        self.head = model

    @property
    def aux_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.head.aux_layers

    def bind(self, services: SpeculatorServices) -> None:
        super().bind(services)
        target = self.head.target
        # Postponed tokens in the order of their steps: hidden states, positions and slots.
        dtype, shape = target.model.norm.weight.dtype, (MOST_WAITING, target.config.hidden_size)
        bytes_per_state = math.prod(shape) * dtype.itemsize
        self._states = [
            self.device.allocate(bytes_per_state).view(dtype).view(shape) for _ in range(1 + len(self.aux_layers))
        ]
        self._positions = self.device.upload(np.zeros(MOST_WAITING, dtype=np.int64))
        self._slots = np.zeros(MOST_WAITING, dtype=np.int64)
        self._num_waiting = 0

    def remove(self, slot: int) -> None:
        # Its blocks may become a cached prefix, and are reused only after this step's forward pass.
        if slot in self._slots[: self._num_waiting]:
            self._take_in_what_waits()

    def most_extra_tokens(self, max_num_reqs: int) -> int:
        return MOST_WAITING

    def lets_wait(self, frame: Frame) -> bool:
        layout = frame.batch.layout
        num_reqs = len(layout.req_ids)
        if not layout.is_all_decodes or num_reqs > MOST_WAITING:
            return False
        if self._num_waiting + num_reqs > MOST_WAITING:
            self._take_in_what_waits()
        assert frame.all_hidden is not None, "needs_hidden is set"
        begin, end = self._num_waiting, self._num_waiting + num_reqs
        for kept, states in zip(self._states, (frame.all_hidden, *self._aux(frame)), strict=True):
            kept[begin:end] = states[:num_reqs]
        self._positions[begin:end] = frame.batch.positions[:num_reqs]
        self._slots[begin:end] = layout.slots_np
        self._num_waiting = end
        return True

    def take_in(self, frame: Frame, outcome: StepOutcome, last_R: Tensor) -> Tensor:
        self._take_in_what_waits()
        batch = frame.batch
        assert frame.all_hidden is not None, "needs_hidden is set"
        hidden_TD = self.head.from_target(frame.all_hidden, self._aux(frame))
        # Row of the step's last known token; rejected drafts follow it.
        rows_R = batch.layout.query_start_loc[1 : len(batch.layout.req_ids) + 1] - 1 - outcome.num_rejected
        positions_R = last_R - 1
        seq_lens_R = last_R.to(torch.int32)
        of_last = [replace(of_group.of_last_tokens(rows_R), seq_lens=seq_lens_R) for of_group in batch.geometry]
        context = self.kv_cache.narrow(frame.context, of_last[0], of_last, rows_R, positions_R)
        return self.run(self._next_tokens(batch), batch.positions, context, hidden_TD)

    def run(self, ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor) -> Tensor:
        return self.execution.forward(self.head, ModelInputs(ids_T, positions_T, hidden=hidden_TD), context)

    def run_all(self, context: ForwardContext, positions_T: Tensor) -> Tensor:
        dtype = self.head.target.model.norm.weight.dtype
        shape = len(positions_T), self.head.target.config.hidden_size
        states = [torch.zeros(shape, dtype=dtype, device=positions_T.device) for _ in (0, *self.aux_layers)]
        hidden_TD = self.head.from_target(states[0], states[1:])
        return self.run(positions_T.to(torch.int32) * 0, positions_T, context, hidden_TD)

    def _aux(self, frame: Frame) -> list[Tensor]:
        return [frame.aux[layer] for layer in self.aux_layers]

    def _take_in_what_waits(self) -> None:
        if not self._num_waiting:
            return
        slots = self._slots[: self._num_waiting]
        rows = np.argsort(slots, kind="stable")
        self._num_waiting = 0
        slots_R, starts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
        parts = (rows, slots_R, np.append(starts, len(rows)), np.repeat(np.arange(len(counts)), counts))
        rows_T, slots, starts_R, request_of_T = self.device.upload(np.concatenate(parts)).split([*map(len, parts)])
        positions_T = self._positions.index_select(0, rows_T)
        ids_T = self.tokens_at(slots.index_select(0, request_of_T), positions_T + 1)
        hidden_TD, *aux = [states.index_select(0, rows_T) for states in self._states]
        context = self.ragged(slots, parts[2], starts_R, request_of_T, positions_T)
        self.run(ids_T, positions_T, context, self.head.from_target(hidden_TD, aux))

    def _next_tokens(self, batch: InputBatch) -> Tensor:
        """The token after each token of the step, int32 [T]: of a prompt, or sampled."""
        tensors = batch.layout.tensors
        return self.tokens_at(tensors.idx_mapping_R.index_select(0, tensors.token_to_req_T), batch.positions + 1)
