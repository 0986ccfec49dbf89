"""What one layout's steps read from and write to the per-slot state, bound once to the tensors of both.

While the same requests decode on, step after step has the same layout, and then nothing but the state's contents
changes from one call to the next. Suffixes are those of `kernels.step_state`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias

from torch import Tensor


class SlotTensors(NamedTuple):
    """The state: as in `kernels.step_state`; block_tables_SB and block_sizes have an entry per KV-cache group."""

    all_token_ids_SL: Tensor
    total_len_S: Tensor
    num_computed_tokens_S: Tensor
    prefill_len_S: Tensor
    block_tables_SB: tuple[Tensor, ...]
    block_sizes: tuple[int, ...]


class LayoutTensors(NamedTuple):
    """Which token belongs to which request: as in `kernels.step_state`, padding included.

    num_reqs, num_tokens: the actual ones, which come first.
    """

    idx_mapping_R: Tensor
    num_scheduled_R: Tensor
    token_to_req_T: Tensor
    token_offset_T: Tensor
    num_reqs: int
    num_tokens: int


class StepTensors(NamedTuple):
    """input_ids_T int32. positions_T int64. seq_lens_R int32.

    Per KV-cache group: block_tables_RB int32, slot_mappings_T int64.
    """

    input_ids_T: Tensor
    positions_T: Tensor
    seq_lens_R: Tensor
    block_tables_RB: tuple[Tensor, ...]
    slot_mappings_T: tuple[Tensor, ...]


# Per request its token, in a list that is empty where it does not count; and its failure, None if there is none at all.
TokensOnHost: TypeAlias = tuple[list[list[int]], list[int] | None]


class BoundStep(ABC):
    """The calls of a step, in their order. The tensors must stay where they are as long as this is in use."""

    @abstractmethod
    def gather(self, num_columns: tuple[int, ...]) -> StepTensors:
        """The inputs of the next step.

        num_columns: per KV-cache group, columns of the block table that the step's requests reach.
        May return the tensors of the step before with new contents, and then it returns the same object.
        """

    @abstractmethod
    def outcome(self, sampled_token_ids_R: Tensor, failures_R: Tensor) -> tuple[Tensor, TokensOnHost | None]:
        """What came of the step, int64 [3, num_reqs]: sampled token, whether it counts, failure.

        A token counts where the step reached the end of the known tokens: 1, else 0. sampled_token_ids_R: int64.
        failures_R: bool or int64.
        Where the host can read the tensors at once it comes with what the host wants of it; then, and only then, the
        next outcome may overwrite the tensor.
        """

    @abstractmethod
    def advance(self, outcome_3R: Tensor) -> None:
        """Record the outcome of the step in the state."""
