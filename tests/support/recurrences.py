"""Steps of requests over pages of recurrent states, as a scheduler makes them, for tests of kernels.

A plan is a list of steps, each a list of (request, tokens, rejected tokens). Rows that were rejected hold other values
when their positions are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.recurrent_state import StateStep

BLOCK_SIZE = 4
Plan = Sequence[Sequence[tuple[int, int, int]]]
# Requests alone, in one chunk; in chunks, with decodes beside them; with drafts, accepted or not, around a border.
WHOLE: Plan = [[(0, 13, 0)], [(1, 6, 0)], [(2, 9, 0)]]
CHUNKS: Plan = [[(1, 1, 0), (0, 3, 0)], [(0, 1, 0), (1, 5, 0), (2, 7, 0)], [(0, 9, 0), (2, 1, 0)], [(2, 1, 0)]]
DRAFTS: Plan = [
    [(0, 4, 0), (1, 3, 1), (2, 6, 0)],
    [(0, 3, 2), (1, 4, 0)],
    [(2, 3, 2), (0, 3, 0)],
    [(2, 2, 0), (0, 5, 0)],
]
LENGTHS = 13, 6, 9


def run_plan(
    plan: Plan,
    rows: Sequence[Tensor],
    pages: Tensor,
    compute: Callable[[Tensor, StateStep], Tensor],
    *,
    max_drafts: int = 2,
    num_padding: int = 0,
    from_snapshots: bool = False,
) -> list[Tensor]:
    """Run a plan's steps: outputs of each request's rows. rows: [length, width] of each request.

    pages: [B, ...], which keep states; filled with old values first. compute: a step's outputs from its rows.
    from_snapshots: requests lose their own pages after each step that ends at a border, and begin from the snapshot.
    """
    pages.copy_(torch.full_like(pages, 7.0))
    num_own = 1 + max_drafts
    columns = num_own + max(map(len, rows)) // BLOCK_SIZE + 1
    table = 1 + torch.arange(len(rows) * columns, dtype=torch.int32).view(len(rows), columns)
    assert len(pages) > len(rows) * columns
    done = [0] * len(rows)
    outputs = [torch.zeros(0)] * len(rows)
    for step in plan:
        counts = [count for _, count, _ in step] + [num_padding] * (num_padding > 0)
        of_tokens = []
        for request, count, rejected in step:
            begin = done[request]
            taken = rows[request][begin : begin + count].clone()
            taken[count - rejected :] += 1.0
            of_tokens.append(taken)
        of_tokens += [torch.zeros(num_padding, rows[0].shape[1])]
        lengths = [done[request] + count for request, count, _ in step] + [0] * (num_padding > 0)
        block_table = torch.zeros(len(counts), columns, dtype=torch.int32)
        for row, (request, _, _) in enumerate(step):
            block_table[row] = table[request]
            # Its own pages do not matter at a border.
            if from_snapshots and done[request] % BLOCK_SIZE == 0:
                pages[table[request, :num_own].long()] = float("nan")
        num_tokens = sum(count for _, count, _ in step)
        slots = torch.arange(num_tokens + num_padding)
        slots[num_tokens:] = -1
        geometry = StateStep(
            block_table,
            torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            slots,
            num_own_blocks=num_own,
            block_size=BLOCK_SIZE,
            max_query_len=max(counts),
        )
        out = compute(torch.cat(of_tokens), geometry)
        assert out.isfinite().all()
        for (request, count, rejected), found in zip(step, out.split(counts)[: len(step)], strict=True):
            kept = found[: count - rejected]
            outputs[request] = torch.cat((outputs[request][: done[request]], kept)) if done[request] else kept
            done[request] += count - rejected
    return outputs
