"""Draft model: a smaller model of its own. Suffixes: T tokens, R requests of the step, D hidden size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.contract import NewRequestData
from penstock.kernels.bound_step import StepOutcome
from penstock.models.interface import ModelInputs
from penstock.runner.speculative.model_drafter import MOST_WAITING, ModelDrafter
from penstock.runner.speculative.speculator import SpeculatorServices
from penstock.step.batch import BatchLayout
from penstock.step.frame import Frame


class DraftModel(ModelDrafter):
    """A separate model with the target's vocabulary, which computes its own KV of the target's tokens.

    Its KV covers its accepted drafts already, except for the last one; so of each request it reads the tokens that were
    known before the step, and one more.
    """

    reads_ahead = 0

    def bind(self, services: SpeculatorServices) -> None:
        super().bind(services)
        # Postponed tokens by slot.
        self._num_waiting = np.zeros(services.requests.max_num_reqs + 1, dtype=np.int64)

    def add(self, slot: int, request: NewRequestData) -> None:
        super().add(slot, request)
        self._num_waiting[slot] = 0

    def remove(self, slot: int) -> None:
        # Its blocks may become a cached prefix, and are reused only after this step's forward pass.
        if self._num_waiting[slot]:
            slots_np = np.array([slot])
            slots_R = self.device.upload(slots_np)
            last_R = self.requests.num_computed_tokens.tensor.view(-1).index_select(0, slots_R)
            self._read(slots_R, self._num_waiting[slots_np], last_R)
            self._num_waiting[slot] = 0

    def most_extra_tokens(self, max_num_reqs: int) -> int:
        return max_num_reqs + MOST_WAITING

    def lets_wait(self, frame: Frame) -> bool:
        layout = frame.batch.layout
        counts = _num_known(layout)
        if counts.max() > 1 or self._num_waiting.sum() + len(counts) > MOST_WAITING:
            return False
        self._num_waiting[layout.slots_np] += 1
        return True

    def take_in(self, frame: Frame, outcome: StepOutcome, last_R: Tensor) -> Tensor:
        layout = frame.batch.layout
        counts = _num_known(layout) + self._num_waiting[layout.slots_np] + 1
        self._num_waiting[layout.slots_np] = 0
        return self._read(layout.slots, counts, last_R)

    def _read(self, slots_R: Tensor, counts: np.ndarray, last_R: Tensor) -> Tensor:
        """Hidden states [R, D] of each request's last token, after a forward pass over its last `counts` tokens."""
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        request_of = np.repeat(np.arange(len(counts)), counts)
        # Counted back from each request's last token, so that no token lies after its end.
        offsets = np.arange(starts[-1]) - starts[1:][request_of] + 1
        parts = (starts, request_of, offsets)
        starts_R, request_of_T, offsets_T = self.device.upload(np.concatenate(parts)).split([*map(len, parts)])
        last_R = torch.minimum(last_R, self._length_limit.tensor.index_select(0, slots_R) - 1)
        positions_T = last_R.index_select(0, request_of_T) + offsets_T
        ids_T = self.tokens_at(slots_R.index_select(0, request_of_T), positions_T)
        context = self.ragged(slots_R, starts, starts_R, request_of_T, positions_T)
        return self.execution.forward(self.model, ModelInputs(ids_T, positions_T), context)

    def run(self, ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor) -> Tensor:
        return self.execution.forward(self.model, ModelInputs(ids_T, positions_T), context)

    def run_all(self, context: ForwardContext, positions_T: Tensor) -> Tensor:
        return self.run(positions_T.to(torch.int32) * 0, positions_T, context, positions_T)


def _num_known(layout: BatchLayout) -> np.ndarray:
    """Tokens of each request in the step except drafts, int64 [R]."""
    return layout.counts_np if layout.num_drafts_np is None else layout.counts_np - layout.num_drafts_np
