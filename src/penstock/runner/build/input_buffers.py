"""Input buffers of one step in flight, of the largest size, allocated once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.device import Device
from penstock.kernels.bound_step import StepTensors
from penstock.runner.block_tables import BlockTables
from penstock.step.inputs import StepInput

# Numbers of a layout per row (request or padding) and per token: see `batch_layout`.
_PER_ROW, _PER_TOKEN = 6, 5


class InputBuffers:
    """Buffers of a step's gathered inputs and of its layout; the next step overwrites both.

    Steps of one padded size find everything at the same addresses. tensors: sized for the largest step. named: buffers
    of the declared step inputs by name.
    """

    def __init__(
        self,
        device: Device,
        max_num_tokens: int,
        max_num_reqs: int,
        block_tables: BlockTables,
        step_inputs: Sequence[StepInput] = (),
    ) -> None:
        self._device = device
        # One row more: padding tokens need a padding row.
        num_rows = max_num_reqs + 1
        tables = [block_tables.table(group) for group in range(len(block_tables.block_sizes))]
        self.tensors = StepTensors(
            input_ids_T=self._allocate(torch.int32, max_num_tokens),
            positions_T=self._allocate(torch.int64, max_num_tokens),
            seq_lens_R=self._allocate(torch.int32, num_rows),
            block_tables_RB=tuple(
                self._allocate(torch.int32, num_rows * table.shape[1]).view(num_rows, -1) for table in tables
            ),
            slot_mappings_T=tuple(self._allocate(torch.int64, max_num_tokens) for _ in tables),
        )
        self.named = {
            step_input.name: self._allocate(step_input.dtype, max_num_tokens * math.prod(step_input.shape)).view(
                max_num_tokens, *step_input.shape
            )
            for step_input in step_inputs
        }
        self._layout = self._allocate(torch.int64, _PER_ROW * num_rows + _PER_TOKEN * max_num_tokens + 1)
        self._starts = self._allocate(torch.int32, num_rows + 1)

    def write_layout(self, parts: Sequence[np.ndarray]) -> Sequence[Tensor]:
        """Upload the parts of a layout, int64 each, in one copy."""
        array = np.concatenate(parts)
        layout = self._layout[: len(array)]
        self._device.write(layout, array)
        tensors: Sequence[Tensor] = layout.split([len(part) for part in parts])
        return tensors

    def write_starts(self, starts: Tensor) -> Tensor:
        """Store query start locations, a part of the layout, as int32."""
        return self._starts[: len(starts)].copy_(starts)

    def _allocate(self, dtype: torch.dtype, size: int) -> Tensor:
        return self._device.allocate(size * dtype.itemsize).view(dtype)
