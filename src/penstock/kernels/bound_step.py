"""Gathering of inputs and updates of the per-slot state, bound once to the tensors of one batch layout.

While the same requests decode, every step has the same layout, and only the state's contents change. Suffixes are those
of `kernels.step_state`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias

from torch import Tensor


class SlotTensors(NamedTuple):
    """Per-slot state: as in `kernels.step_state`; block_tables_SB and block_sizes have an entry per KV-cache group.

    draft_token_ids_SD: draft tokens that a step verifies, from column 0 on.
    """

    all_token_ids_SL: Tensor
    total_len_S: Tensor
    num_computed_tokens_S: Tensor
    prefill_len_S: Tensor
    block_tables_SB: tuple[Tensor, ...]
    block_sizes: tuple[int, ...]
    draft_token_ids_SD: Tensor


class DraftTensors(NamedTuple):
    """Draft counts of a step's requests, unpadded; tensors are int64 [requests].

    num_drafts_R: draft tokens, scheduled last. num_checked_R: drafts to verify; the request has num_checked + 1
    logits rows, from first_row_R on. max_drafts: maximum of num_drafts_R.
    """

    num_drafts_R: Tensor
    num_checked_R: Tensor
    first_row_R: Tensor
    max_drafts: int


class LayoutTensors(NamedTuple):
    """Mapping of tokens to requests: as in `kernels.step_state`, padding included.

    num_reqs, num_tokens: the actual ones, which come first. drafts: None in a step without drafts.
    """

    idx_mapping_R: Tensor
    num_scheduled_R: Tensor
    token_to_req_T: Tensor
    token_offset_T: Tensor
    num_reqs: int
    num_tokens: int
    drafts: DraftTensors | None = None

    @property
    def max_drafts(self) -> int:
        return 0 if self.drafts is None else self.drafts.max_drafts


class StepTensors(NamedTuple):
    """Inputs of a step: int32, but positions_T int64.

    Per KV-cache group: block_tables_RB int32, slot_mappings_T int64.
    """

    input_ids_T: Tensor
    positions_T: Tensor
    seq_lens_R: Tensor
    block_tables_RB: tuple[Tensor, ...]
    slot_mappings_T: tuple[Tensor, ...]

    def part(self, num_tokens: int, num_rows: int, num_columns: tuple[int, ...]) -> StepTensors:
        """Slice a step's tensors from those of the largest step. num_columns: used columns of each block table."""
        tables = zip(self.block_tables_RB, num_columns, strict=True)
        return StepTensors(
            self.input_ids_T[:num_tokens],
            self.positions_T[:num_tokens],
            self.seq_lens_R[:num_rows],
            tuple(table[:num_rows, :width] for table, width in tables),
            tuple(slot_mapping[:num_tokens] for slot_mapping in self.slot_mappings_T),
        )


class StepOutcome(NamedTuple):
    """Outcome of a step for each of its requests.

    table_RX: int64; columns: 1 + max_drafts sampled tokens (undefined from num_sampled on), num_sampled,
    num_rejected, failure code.
    """

    table_RX: Tensor

    @property
    def sampled_token_ids(self) -> Tensor:
        """[requests, columns]."""
        return self.table_RX[:, :-3]

    @property
    def num_sampled(self) -> Tensor:
        return self.table_RX[:, -3]

    @property
    def num_rejected(self) -> Tensor:
        return self.table_RX[:, -2]

    @property
    def failures(self) -> Tensor:
        return self.table_RX[:, -1]


# Sampled tokens per request; and failures, None if no request has failed.
TokensOnHost: TypeAlias = tuple[list[list[int]], list[int] | None]


class BoundStep(ABC):
    """The calls of a step, in their order. The bound tensors must keep their addresses."""

    @abstractmethod
    def gather(self, num_columns: tuple[int, ...]) -> StepTensors:
        """Gather the next step's inputs, with its drafts written after the known tokens.

        num_columns: per KV-cache group, block table columns that the step's requests use.
        The results are views of the bound buffers. Returns the same object until num_columns changes.
        """

    @abstractmethod
    def outcome(self, sampled_token_ids_L: Tensor, failures_L: Tensor) -> tuple[StepOutcome, TokensOnHost | None]:
        """Compute the step's outcome from the tokens of its logits rows (`kernels.step_state.verify_drafts`).

        sampled_token_ids_L: int64. failures_L: bool or int64, nonzero where the row has no token.
        Returns TokensOnHost too if the outcome is in host memory; the next outcome may overwrite the table only then.
        """

    @abstractmethod
    def advance(self, outcome: StepOutcome) -> None:
        """Update the state by the step's outcome."""
