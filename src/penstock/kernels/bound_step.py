"""What one layout's steps read from and write to the per-slot state, bound once to the tensors of both.

While the same requests decode on, step after step has the same layout, and then nothing but the state's contents
changes from one call to the next. Suffixes are those of `kernels.step_state`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias

from torch import Tensor


class SlotTensors(NamedTuple):
    """The state: as in `kernels.step_state`; block_tables_SB and block_sizes have an entry per KV-cache group.

    draft_token_ids_SD: where a step that has drafts finds them, the first of them at 0.
    """

    all_token_ids_SL: Tensor
    total_len_S: Tensor
    num_computed_tokens_S: Tensor
    prefill_len_S: Tensor
    block_tables_SB: tuple[Tensor, ...]
    block_sizes: tuple[int, ...]
    draft_token_ids_SD: Tensor


class DraftTensors(NamedTuple):
    """The drafts of a step's actual requests; int64 [requests] each.

    num_drafts_R: how many each has, the last of its tokens. num_checked_R: how many of them may be accepted: it has one
    logits row more than that. first_row_R: the first of its logits rows. max_drafts: the most that a request has.
    """

    num_drafts_R: Tensor
    num_checked_R: Tensor
    first_row_R: Tensor
    max_drafts: int


class LayoutTensors(NamedTuple):
    """Which token belongs to which request: as in `kernels.step_state`, padding included.

    num_reqs, num_tokens: the actual ones, which come first. drafts: None where the step has none.
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
    """input_ids_T int32. positions_T int64. seq_lens_R int32.

    Per KV-cache group: block_tables_RB int32, slot_mappings_T int64.
    """

    input_ids_T: Tensor
    positions_T: Tensor
    seq_lens_R: Tensor
    block_tables_RB: tuple[Tensor, ...]
    slot_mappings_T: tuple[Tensor, ...]

    def part(self, num_tokens: int, num_rows: int, num_columns: tuple[int, ...]) -> StepTensors:
        """The beginning of each, with so many columns of the tables: the tensors of a step, in those of the largest."""
        tables = zip(self.block_tables_RB, num_columns, strict=True)
        return StepTensors(
            self.input_ids_T[:num_tokens],
            self.positions_T[:num_tokens],
            self.seq_lens_R[:num_rows],
            tuple(table[:num_rows, :width] for table, width in tables),
            tuple(slot_mapping[:num_tokens] for slot_mapping in self.slot_mappings_T),
        )


class StepOutcome(NamedTuple):
    """What came of a step, for each of its requests.

    table_RX: int64, the sampled tokens, as many columns as a request may have, then their number, the number of
    rejected drafts, and the failure. Of columns beyond the number of sampled tokens the content is void.
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


# Per request its sampled tokens; and its failure, None if there is none at all.
TokensOnHost: TypeAlias = tuple[list[list[int]], list[int] | None]


class BoundStep(ABC):
    """The calls of a step, in their order. The tensors must stay where they are as long as this is in use."""

    @abstractmethod
    def gather(self, num_columns: tuple[int, ...]) -> StepTensors:
        """The inputs of the next step, whose drafts are written behind the known tokens.

        num_columns: per KV-cache group, columns of the block table that the step's requests reach.
        They lie in the buffers that the step was bound with. Where they are those of the step before, with new
        contents, it returns the same object.
        """

    @abstractmethod
    def outcome(self, sampled_token_ids_L: Tensor, failures_L: Tensor) -> tuple[StepOutcome, TokensOnHost | None]:
        """What came of the step, by what was sampled at its logits rows (`kernels.step_state.verify_drafts`).

        sampled_token_ids_L: int64. failures_L: bool or int64, not 0 where the row has no token.
        Where the host can read the outcome at once it comes with what the host wants of it; then, and only then, the
        next outcome may overwrite the table.
        """

    @abstractmethod
    def advance(self, outcome: StepOutcome) -> None:
        """Record the outcome of the step in the state."""
