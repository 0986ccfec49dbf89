"""Pages of recurrent states in a step: where each request's state comes from, and where states are kept.

`RecurrentStateSpec` describes the block table. Suffixes: R requests, T tokens, B columns of the block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.native.attention import StepRequests
from penstock.kernels.native.recurrence import StateRequests


class StatePages(NamedTuple):
    """Pages of a step's states, int64; 0 for none.

    before_R: state before each request's first token of the step; none at the beginning of the request.
    own_T: where the state after a token is kept for later steps; none for tokens that are followed by too many.
    snapshots_T: where it is kept for other requests too.
    """

    before_R: Tensor
    own_T: Tensor
    snapshots_T: Tensor


def state_pages(
    block_table_RB: Tensor,
    query_start_loc: Tensor,
    seq_lens_R: Tensor,
    slot_mapping_T: Tensor,
    num_own_blocks: int,
    block_size: int,
) -> StatePages:
    """Look up the pages of a step's states, of any padded size, without synchronisation.

    All are of `StepGeometry`. A state that is written must be on its page before the request's next step. A page in
    `before_R` may be one of `own_T`: a layer reads it before it writes.
    """
    last_column = block_table_RB.shape[1] - 1

    def page(rows: Tensor, columns: Tensor, is_there: Tensor) -> Tensor:
        return torch.where(is_there, block_table_RB[rows, columns.clamp(0, last_column)].long(), 0)

    starts, ends_R = query_start_loc.long(), seq_lens_R.long()
    rows_R = torch.arange(len(ends_R), device=ends_R.device)
    first_R = ends_R - (starts[1:] - starts[:-1])
    snapshot_R = page(rows_R, num_own_blocks + first_R // block_size - 1, (first_R > 0) & (first_R % block_size == 0))
    own_R = page(rows_R, (first_R - 1) % num_own_blocks, first_R > 0)

    tokens_T = torch.arange(len(slot_mapping_T), device=ends_R.device)
    rows_T = torch.searchsorted(starts[1:].contiguous(), tokens_T, right=True).clamp(max=len(ends_R) - 1)
    positions_T = ends_R[rows_T] - starts[1:][rows_T] + tokens_T
    is_token_T = slot_mapping_T >= 0
    is_kept_T = is_token_T & (positions_T >= ends_R[rows_T] - num_own_blocks)
    is_border_T = is_token_T & ((positions_T + 1) % block_size == 0)
    return StatePages(
        torch.where(snapshot_R > 0, snapshot_R, own_R),
        page(rows_T, positions_T % num_own_blocks, is_kept_T),
        page(rows_T, num_own_blocks + positions_T // block_size, is_border_T),
    )


@dataclass(frozen=True, slots=True)
class StateStep:
    """Requests of a step, as operations on recurrent states take them: tensors and numbers of `StepGeometry`.

    max_query_len: most tokens of a request. requests, num_tokens: requests and tokens without padding, for the C++
    kernels.
    """

    block_table_RB: Tensor
    query_start_loc: Tensor
    seq_lens_R: Tensor
    slot_mapping_T: Tensor
    num_own_blocks: int
    block_size: int
    max_query_len: int
    requests: StepRequests
    num_tokens: int

    @property
    def of_library(self) -> StateRequests:
        """The step for the C++ kernels."""
        return StateRequests(self.requests, self.num_own_blocks, self.block_size, self.num_tokens)

    def pages(self) -> StatePages:
        """`state_pages` of the step."""
        return state_pages(
            self.block_table_RB,
            self.query_start_loc,
            self.seq_lens_R,
            self.slot_mapping_T,
            num_own_blocks=self.num_own_blocks,
            block_size=self.block_size,
        )
