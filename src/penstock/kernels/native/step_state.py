"""`kernels.step_state` in C++: one call where numpy takes a dozen, whose cost is all in the calling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NativeStepState:
    """The four functions of `kernels.step_state`, with the same arguments; all tensors are contiguous CPU tensors."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def gather_step_inputs(
        self,
        all_token_ids_SL: Tensor,
        num_computed_tokens_S: Tensor,
        idx_mapping_R: Tensor,
        num_scheduled_R: Tensor,
        token_to_req_T: Tensor,
        token_offset_T: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, num_tokens = idx_mapping_R.shape[0], token_to_req_T.shape[0]
        input_ids_T = torch.empty(num_tokens, dtype=torch.int32)
        positions_T = torch.empty(num_tokens, dtype=torch.int64)
        seq_lens_R = torch.empty(num_rows, dtype=torch.int32)
        self._module.gather_step_inputs(
            all_token_ids_SL.data_ptr(),
            all_token_ids_SL.shape[1],
            num_computed_tokens_S.data_ptr(),
            idx_mapping_R.data_ptr(),
            num_scheduled_R.data_ptr(),
            token_to_req_T.data_ptr(),
            token_offset_T.data_ptr(),
            num_rows,
            num_tokens,
            input_ids_T.data_ptr(),
            positions_T.data_ptr(),
            seq_lens_R.data_ptr(),
        )
        return input_ids_T, positions_T, seq_lens_R

    def compute_slot_mapping(
        self,
        block_tables_SB: Tensor,
        idx_mapping_R: Tensor,
        token_to_req_T: Tensor,
        positions_T: Tensor,
        block_size: int,
        num_actual_tokens: int,
    ) -> Tensor:
        slot_mapping_T = torch.empty(positions_T.shape[0], dtype=torch.int64)
        self._module.compute_slot_mapping(
            block_tables_SB.data_ptr(),
            block_tables_SB.shape[1],
            idx_mapping_R.data_ptr(),
            token_to_req_T.data_ptr(),
            positions_T.data_ptr(),
            positions_T.shape[0],
            num_actual_tokens,
            block_size,
            slot_mapping_T.data_ptr(),
        )
        return slot_mapping_T

    def count_sampled(self, seq_lens_R: Tensor, prefill_len_S: Tensor, idx_mapping_R: Tensor) -> Tensor:
        num_sampled_R = torch.empty(seq_lens_R.shape[0], dtype=torch.int64)
        self._module.count_sampled(
            seq_lens_R.data_ptr(),
            prefill_len_S.data_ptr(),
            idx_mapping_R.data_ptr(),
            seq_lens_R.shape[0],
            num_sampled_R.data_ptr(),
        )
        return num_sampled_R

    def advance_state(
        self,
        all_token_ids_SL: Tensor,
        total_len_S: Tensor,
        num_computed_tokens_S: Tensor,
        idx_mapping_R: Tensor,
        sampled_token_ids_R: Tensor,
        num_sampled_R: Tensor,
        num_scheduled_R: Tensor,
        num_rejected_R: Tensor | None = None,
    ) -> None:
        self._module.advance_state(
            all_token_ids_SL.data_ptr(),
            all_token_ids_SL.shape[1],
            total_len_S.data_ptr(),
            num_computed_tokens_S.data_ptr(),
            idx_mapping_R.data_ptr(),
            sampled_token_ids_R.data_ptr(),
            num_sampled_R.data_ptr(),
            num_scheduled_R.data_ptr(),
            0 if num_rejected_R is None else num_rejected_R.data_ptr(),
            idx_mapping_R.shape[0],
        )
