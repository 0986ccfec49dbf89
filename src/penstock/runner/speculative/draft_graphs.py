"""CUDA graphs of a drafter's decode steps: the drafts of greedy requests in one replay, or one replay per draft.

Suffixes: R requests, padded; B blocks; D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT, ForwardContext, StepGeometry
from penstock.kernels.step_state import PAD_SLOT_ID, compute_slot_mapping
from penstock.models.causal_lm import CausalLM
from penstock.models.interface import choose_greedy
from penstock.runner.block_tables import BlockTables
from penstock.runner.execute.execution import DRAFTS, Execution


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Inputs of a drafter's first decode step, one row per request.

    tokens_R: int64. positions_R: int64, one before those of the step. limits_R: int64, lengths that no position
    reaches. hidden_RD: of the positions before. tables: int32 [R, B] by KV-cache group.
    """

    tokens_R: Tensor
    positions_R: Tensor
    limits_R: Tensor
    hidden_RD: Tensor
    tables: Sequence[Tensor]


class _RunDrafter(Protocol):
    def __call__(self, ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor, /) -> Tensor: ...


class DraftGraphs:
    """Decode steps on persistent tensors, which the graphs read and advance.

    size_for: padded number of requests; None where there is no graph for so many. run: forward pass of the drafter.
    make_context: context of one KV geometry per group. numbers: int64, 0, 1, 2, …, as many as requests at most. Padding
    rows have length 0 and write nothing.
    """

    def __init__(
        self,
        execution: Execution,
        size_for: Callable[[int], int | None],
        model: CausalLM,
        block_tables: BlockTables,
        numbers: Tensor,
        run: _RunDrafter,
        make_context: Callable[[list[StepGeometry]], ForwardContext],
    ) -> None:
        self._execution = execution
        self.size_for = size_for
        self._model = model
        self._block_sizes = tuple(block_tables.block_sizes)
        self._numbers = numbers
        self._starts = numbers.int()
        self._run = run
        self._make_context = make_context
        self._is_row = torch.zeros(len(numbers), dtype=torch.bool, device=numbers.device)
        self._inputs: DraftInputs | None = None

    def begin(self, inputs: DraftInputs, size: int) -> None:
        """Take the inputs of so many requests, to be padded to `size` rows."""
        num_reqs = len(inputs.tokens_R)
        if self._inputs is None:
            self._inputs = _like(inputs, len(self._numbers))
        for field in fields(DraftInputs):
            kept, given = getattr(self._inputs, field.name), getattr(inputs, field.name)
            pairs = zip(kept, given, strict=True) if field.name == "tables" else ((kept, given),)
            for tensor, values in pairs:
                tensor[:num_reqs].copy_(values)
        torch.lt(self._numbers[:size], num_reqs, out=self._is_row[:size])

    def greedy(self, size: int, num_drafts: int) -> Sequence[Tensor]:
        """Return the tokens of the next `num_drafts` steps, int64 [size] each, in memory that the next call reuses."""
        return self._execution.compute(
            lambda: [self._choose(self._step(size), size) for _ in range(num_drafts)],
            DRAFTS,
            ("drafts", size, num_drafts),
        )

    def step(self, size: int, token_R: Tensor | None = None) -> Tensor:
        """Return hidden states [size, D] of the next step. token_R: tokens of the actual requests."""
        inputs = self._known
        if token_R is not None:
            inputs.tokens_R[: len(token_R)].copy_(token_R)
        return self._execution.compute(lambda: self._step(size), DRAFTS, ("draft", size))

    @property
    def _known(self) -> DraftInputs:
        assert self._inputs is not None, "`begin` comes first"
        return self._inputs

    def _step(self, size: int) -> Tensor:
        """Advance the positions, and run the drafter there."""
        inputs, is_row = self._known, self._is_row[:size]
        positions_R = inputs.positions_R[:size]
        positions_R.copy_(torch.minimum(positions_R + 1, inputs.limits_R[:size] - 1))
        numbers_R = self._numbers[:size]
        geometry = []
        for table_NB, block_size in zip(inputs.tables, self._block_sizes, strict=True):
            table_RB = table_NB[:size]
            slots_R = compute_slot_mapping(table_RB, numbers_R, numbers_R, positions_R, block_size, size)
            geometry.append(
                StepGeometry(
                    query_start_loc=self._starts[: size + 1],
                    query_start_loc_np=np.arange(size + 1),
                    seq_lens=((positions_R + 1) * is_row).to(torch.int32),
                    block_table=table_RB,
                    slot_mapping=torch.where(is_row, slots_R, PAD_SLOT_ID),
                    num_actual_tokens=size,
                    num_actual_reqs=size,
                    max_query_len=1,
                    max_seq_len_upper_bound=table_RB.shape[1] * block_size,
                    block_size=block_size,
                )
            )
        context = self._make_context(geometry)
        hidden_RD = self._run(inputs.tokens_R[:size].int(), positions_R, context, inputs.hidden_RD[:size].clone())
        inputs.hidden_RD[:size].copy_(hidden_RD)
        return hidden_RD

    def _choose(self, hidden_RD: Tensor, size: int) -> Tensor:
        chosen = choose_greedy(self._model, hidden_RD, NO_CONTEXT)
        self._known.tokens_R[:size].copy_(chosen.token_ids_R)
        return chosen.token_ids_R


def _like(inputs: DraftInputs, num_rows: int) -> DraftInputs:
    """Tensors of so many rows, of zeros: rows of padding read valid tokens and positions."""

    def zeros(tensor: Tensor) -> Tensor:
        return tensor.new_zeros((num_rows, *tensor.shape[1:]))

    return DraftInputs(
        zeros(inputs.tokens_R),
        zeros(inputs.positions_R),
        zeros(inputs.limits_R),
        zeros(inputs.hidden_RD),
        [zeros(table) for table in inputs.tables],
    )
