"""What the speculators without a model share: they read requests' tokens and write drafts, where the host can."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from penstock.config import SpeculativeConfig
from penstock.contract import DraftTokenIds, SamplingParams
from penstock.device.stand_in import host_array
from penstock.kernels.prompt_lookup import NO_DRAFT
from penstock.runner.block_tables import BlockTables
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import Sampler
from penstock.runner.speculative.speculator import DraftingStep, Speculator


class HostSpeculator(Speculator):
    """Drafts for one request after another, from the runner's table of tokens, which the host reads where it is."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        # Where acceptance is made up, so are drafts.
        self._always_drafts = config.rejection_sample_method == "synthetic"
        # Slots whose requests want no drafts.
        self._silent_slots: set[int] = set()
        self._proposed: DraftTokenIds | None = None
        self.requests: RequestStates
        self._sampler: Sampler
        self._token_ids: np.ndarray
        self._num_tokens: np.ndarray
        self._drafts: np.ndarray

    def bind(
        self, requests: RequestStates, block_tables: BlockTables, kv_cache: PagedKVCache, sampler: Sampler
    ) -> None:
        self.requests, self._sampler = requests, sampler
        self._silent_slots.clear()
        self._proposed = None
        self._token_ids = host_array(requests.all_token_ids.tensor)
        self._num_tokens = host_array(requests.total_len.tensor.view(-1))
        self._drafts = host_array(requests.draft_token_ids.tensor)

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._silent_slots.discard(slot)
        if params.num_speculative_tokens == 0:
            self._silent_slots.add(slot)

    def remove_request(self, slot: int) -> None:
        self._silent_slots.discard(slot)

    @abstractmethod
    def draft(self, slot: int, token_ids_L: np.ndarray, num_drafts: int) -> np.ndarray | None:
        """How a request goes on: int32, up to num_drafts; None for no idea. token_ids_L: int32, all it has."""

    def propose(self, step: DraftingStep) -> None:
        self._proposed = None
        if not step.num_drafts:
            return
        layout = step.batch.layout
        self._drafts[layout.slots_np] = NO_DRAFT
        req_ids, proposed = [], []
        num_sampled = step.outcome.num_sampled.tolist()
        for req_id, slot, num in zip(layout.req_ids, layout.slots_np.tolist(), num_sampled, strict=True):
            if not num or slot in self._silent_slots or not self._sampler.takes_drafts(slot):
                continue
            token_ids_L = self._token_ids[slot, : self._num_tokens[slot]]
            drafts = self.draft(slot, token_ids_L, step.num_drafts)
            if self._always_drafts:
                drafts = np.resize(token_ids_L[-1:] if drafts is None else drafts, step.num_drafts)
            if drafts is not None and len(drafts):
                self._drafts[slot, : len(drafts)] = drafts
                req_ids.append(req_id)
                proposed.append(drafts.tolist())
        if req_ids:
            self._proposed = DraftTokenIds(req_ids=req_ids, draft_token_ids=proposed)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposed, self._proposed = self._proposed, None
        return proposed

    def dummy_run(self) -> None:
        """It runs nothing that would have to be warm, and takes no memory to speak of."""
