"""Drafts on a pipeline stage before the last one, which has the draft model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.config import SpeculativeConfig
from penstock.contract import DraftTokenIds
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.frame import Frame
from penstock.runner.speculative.speculator import RunnerParts, Speculator, on_host


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

    def bind(self, parts: RunnerParts) -> None:
        self._table_SK = parts.requests.draft_token_ids.tensor
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
