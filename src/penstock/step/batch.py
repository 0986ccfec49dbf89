"""Batch of a step: its sizes, its layout, and the tensors gathered for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.attention import SequenceGeometry, StepGeometry
from penstock.kernels.bound_step import BoundStep, LayoutTensors
from penstock.step.logits_rows import DraftRows, LogitsRows


class BatchPlan(NamedTuple):
    """num_tokens, num_reqs: actual sizes of the step. The padded counts are the sizes of the tensors.

    most_tokens_of_request: upper bound that attention takes for a request's tokens; None for the actual maximum.
    """

    num_tokens: int
    num_reqs: int
    num_tokens_padded: int
    num_reqs_padded: int
    most_tokens_of_request: int | None = None

    @classmethod
    def without_padding(cls, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """Plan a step with these tokens of each request and no padding."""
        num_tokens, num_reqs = sum(num_scheduled_tokens.values()), len(num_scheduled_tokens)
        return cls(num_tokens, num_reqs, num_tokens, num_reqs)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The assignment of a step's tokens to requests, immutable: rising number of tokens (decodes first), then padding.

    Padding tokens belong to the last row, which is a padding row where there is one.

    req_ids, slots_np, counts_np: the actual requests, in batch order. query_start_loc_np: int64 [rows + 1].
    is_all_decodes: every request has one token. has_one_token_each: the same, and there is no padding.
    logits_slots_np: int64 [logits rows], slot of each row. drafts: requests and drafts of the rows, in a step with
    drafts.
    num_drafts_np: int64 [actual requests], number of each request's draft tokens; None in a step without drafts.
    On the device: query_start_loc int32 [rows + 1]; slots int64 [actual requests]; logits_slots int64 [logits rows];
    logits_indices int64 [logits rows], token index of each: a request's last token, or, in a step that verifies drafts,
    the last known one and each draft; tensors: int64, rows and tokens.
    """

    plan: BatchPlan
    req_ids: list[str]
    slots_np: np.ndarray
    counts_np: np.ndarray
    query_start_loc_np: np.ndarray
    max_query_len: int
    is_all_decodes: bool
    has_one_token_each: bool
    query_start_loc: Tensor
    slots: Tensor
    logits_slots_np: np.ndarray
    logits_slots: Tensor
    logits_indices: Tensor
    tensors: LayoutTensors
    drafts: DraftRows | None = None
    num_drafts_np: np.ndarray | None = None

    @property
    def can_be_narrowed(self) -> bool:
        """Whether logits need the requests' last tokens only, and the step has more tokens than these."""
        return self.drafts is None and self.max_query_len > 1

    @property
    def first_rows(self) -> np.ndarray | None:
        """Index of each request's first logits row, int64 [actual requests]; None where each has one row."""
        return None if self.drafts is None else np.flatnonzero(self.drafts.numbers_np == 0)

    def of_logits_rows(self, per_token: Tensor) -> Tensor:
        """Select the logits rows of a tensor [tokens of the step, ...]."""
        if self.is_all_decodes:
            return per_token if self.has_one_token_each else per_token[: len(self.req_ids)]
        return per_token.index_select(0, self.logits_indices)


class InputBatch(NamedTuple):
    """Inputs of one step, in the order of its layout. The next step overwrites the tensors.

    input_ids: int32 [tokens]. positions: int64 [tokens].
    sequences: query starts and lengths. geometry: the same per KV-cache group, with block tables and slot mappings.
    logits_rows: rows whose logits are computed. step: commits the step's outcome to the state.
    """

    layout: BatchLayout
    input_ids: Tensor
    positions: Tensor
    sequences: SequenceGeometry
    geometry: tuple[StepGeometry, ...]
    logits_rows: LogitsRows
    step: BoundStep
