"""Interface of speculators, which propose draft tokens after each step for the next one to verify, and their bases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.attention import CacheLayer, ForwardContext
from penstock.config import SpeculativeConfig
from penstock.contract import DraftTokenIds, NewRequestData
from penstock.device.stand_in import host_array
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.prompt_lookup import NO_DRAFT
from penstock.runner.block_tables import BlockTables
from penstock.runner.execute.execution import Execution
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling import Sampler
from penstock.runner.sampling.verification import EXACT, Verification
from penstock.runner.slot_owner import SlotOwner
from penstock.step.frame import Frame


class SpeculatorServices(NamedTuple):
    """Services of a runner for its speculator.

    execution: runs the drafter's forward passes. size_for: padded number of requests of decode steps that can be
    CUDA graphs (`Padding.size_for`).
    """

    requests: RequestStates
    block_tables: BlockTables
    kv_cache: PagedKVCache
    sampler: Sampler
    execution: Execution
    size_for: Callable[[int], int | None]


class Speculator(SlotOwner):
    """An owner of per-slot state, which writes draft tokens to the runner's `draft_token_ids`.

    num_speculative_tokens: maximum drafts of a request in a step.
    verification: acceptance rule. draft_probs: float32 [slots, drafts, vocabulary], distributions that the drafts were
        drawn from, for a rule that needs them; None where they are not kept.
    drafts_for_all_stages: the last pipeline stage sends its drafts to the others; if not, every stage makes the same.
    needs_hidden: `propose` needs the hidden states of all tokens of each step. aux_layers: and the inputs of
        these layers of the target.
    """

    num_speculative_tokens: int = 0
    verification: Verification = EXACT
    draft_probs: Tensor | None = None
    drafts_for_all_stages: bool = False
    needs_hidden: bool = False
    aux_layers: tuple[int, ...] = ()

    def bind(self, services: SpeculatorServices) -> None:
        """Attach to a runner; state of an earlier one is dropped."""

    @abstractmethod
    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        """Write each request's drafts to its row of `RequestStates.draft_token_ids` on the device, without waiting.

        At most `frame.num_drafts` each, padded with -1; with 0 only the step's tokens are read. Only requests that have
        sampled in the step get drafts. The state has advanced by the outcome.
        """

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        self.propose(frame, outcome)

    @abstractmethod
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts proposed after the last step, once, on the host; may wait for the device.

        Without the padding.
        """

    def most_extra_tokens(self, max_num_reqs: int) -> int:
        """Maximum number of tokens by which the drafter's forward pass exceeds the step's."""
        return 0

    def run_prompt(self, context: ForwardContext, positions: Tensor) -> None:
        """Run the forward pass of `propose` for one prompt at these positions, int64, to measure its memory.

        Only weights need values.
        """

    def cache_layers(self) -> Mapping[str, CacheLayer]:
        """The drafter's own layers with a KV cache, by name; names begin with "draft."."""
        return {}


def on_host(req_ids: Sequence[str], drafts_RK: Tensor) -> DraftTokenIds:
    """Copy the drafts of these requests to the host, without requests that have none. Waits for the device."""
    found = {req_id: row for req_id, row in zip(req_ids, drafts_RK.tolist(), strict=True) if row[0] != NO_DRAFT}
    return DraftTokenIds(req_ids=list(found), draft_token_ids=list(found.values()))


class NoSpeculator(Speculator):
    """Speculative decoding off."""

    commit = SlotOwner.commit

    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        return

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None


NO_SPECULATOR = NoSpeculator()


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

    def bind(self, services: SpeculatorServices) -> None:
        self.requests, self._sampler = services.requests, services.sampler
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


class ReceivedDrafts(Speculator):
    """Receives the drafts of the last stage into its own table.

    aux_layers: target layers whose inputs the last stage's draft head wants.
    """

    drafts_for_all_stages = True

    def __init__(self, config: SpeculativeConfig, aux_layers: tuple[int, ...]) -> None:
        self.aux_layers = aux_layers
        self.num_speculative_tokens = config.num_speculative_tokens
        self._table_SK: Tensor
        self._proposed: tuple[Sequence[str], Tensor, int] | None = None

    def bind(self, services: SpeculatorServices) -> None:
        self._table_SK = services.requests.draft_token_ids.tensor
        self._proposed = None

    def propose(self, frame: Frame, outcome: StepOutcome) -> None:
        layout = frame.batch.layout
        self._proposed = (layout.req_ids, layout.slots.clone(), frame.num_drafts) if frame.num_drafts else None

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposed, self._proposed = self._proposed, None
        if proposed is None:
            return None
        req_ids, slots_R, num_drafts = proposed
        return on_host(req_ids, self._table_SK[:, :num_drafts].index_select(0, slots_R))
