"""Base of speculators without a draft model that run on the host."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from penstock.config import SpeculativeConfig
from penstock.contract import DraftTokenIds, NewRequestData
from penstock.device.stand_in import host_array
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.prompt_lookup import NO_DRAFT
from penstock.runner.frame import Frame
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import Sampler
from penstock.runner.speculative.speculator import RunnerParts, Speculator


class HostSpeculator(Speculator):
    """Drafts for one request after another, from the runner's token table in host memory."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        # Synthetic acceptance needs a draft at every step.
        self._always_drafts = config.rejection_sample_method == "synthetic"
        # Slots of requests that turned drafting off.
        self._silent_slots: set[int] = set()
        self._proposed: DraftTokenIds | None = None
        self.requests: RequestStates
        self._sampler: Sampler
        self._token_ids: np.ndarray
        self._num_tokens: np.ndarray
        self._drafts: np.ndarray

    def bind(self, parts: RunnerParts) -> None:
        self.requests, self._sampler = parts.requests, parts.sampler
        self._silent_slots.clear()
        self._proposed = None
        self._token_ids = host_array(self.requests.all_token_ids.tensor)
        self._num_tokens = host_array(self.requests.total_len.tensor.view(-1))
        self._drafts = host_array(self.requests.draft_token_ids.tensor)

    def add(self, slot: int, request: NewRequestData) -> None:
        self._silent_slots.discard(slot)
        if request.sampling_params.num_speculative_tokens == 0:
            self._silent_slots.add(slot)

    def remove(self, slot: int) -> None:
        self._silent_slots.discard(slot)

    @abstractmethod
    def draft(self, slot: int, token_ids_L: np.ndarray, num_drafts: int) -> np.ndarray | None:
        """Return int32 draft tokens of a request, at most num_drafts, or None. token_ids_L: int32, all its tokens."""

    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        self._proposed = None
        if not frame.num_drafts:
            return
        layout = frame.batch.layout
        self._drafts[layout.slots_np] = NO_DRAFT
        req_ids, proposed = [], []
        num_sampled = outcome.num_sampled.tolist()
        for req_id, slot, num in zip(layout.req_ids, layout.slots_np.tolist(), num_sampled, strict=True):
            if not num or slot in self._silent_slots or not self._sampler.takes_drafts(slot):
                continue
            token_ids_L = self._token_ids[slot, : self._num_tokens[slot]]
            drafts = self.draft(slot, token_ids_L, frame.num_drafts)
            if self._always_drafts:
                drafts = np.resize(token_ids_L[-1:] if drafts is None else drafts, frame.num_drafts)
            if drafts is not None and len(drafts):
                self._drafts[slot, : len(drafts)] = drafts
                req_ids.append(req_id)
                proposed.append(drafts.tolist())
        if req_ids:
            self._proposed = DraftTokenIds(req_ids=req_ids, draft_token_ids=proposed)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposed, self._proposed = self._proposed, None
        return proposed
