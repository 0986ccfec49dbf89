"""A forward pass that was traced, as one C++ call. Suffixes: T tokens of the step, D hidden size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.native import NativeKernels
from penstock.kernels.native.planning import plan_buffers
from penstock.kernels.native.program_step import BoundChoices, StepTokens
from penstock.kernels.native.stored import StoredArguments
from penstock.kernels.native.tracing import Cell, Trace
from penstock.kernels.sampling import ChosenTokens

# Rows that go from kernel to kernel together, between two attentions: enough for products at full speed, few enough
# that what one kernel leaves is in a cache when the next one takes it.
PROGRAM_ROWS = 256

_NO_CELL = -1


class NativeProgram:
    """Takes tokens to hidden states, or to tokens where the trace ends in a choice.

    Holds the weights and caches that were traced. Every kernel is the one that the same call would run by itself, so
    the results have the same bits. output: what the hidden states are in; None where tokens are chosen.
    """

    def __init__(self, kernels: NativeKernels, trace: Trace, output: Cell | None) -> None:
        module = kernels.module
        self._program = module.program_new(kernels.instruction_set.index, PROGRAM_ROWS)
        # Takes the address of what `_arguments` makes.
        self._run: Callable[[int], None] = partial(module.program_run, self._program)
        self._plan = plan_buffers(trace.operations, output)
        self._hidden_size = 0 if output is None else output.width
        self._keeps_alive = trace.keeps_alive
        numbers: dict[Cell | None, int] = {None: _NO_CELL}
        for cell, place in self._plan.places.items():
            numbers[cell] = module.program_buffer(self._program, place.kind, cell.width, place.offset)
        for operation in trace.operations:
            cells = [numbers[cell] for cell in operation.cells]
            module.program_add(self._program, operation.kernel, *cells, *operation.arguments)

    def __call__(self, ids_T: Tensor, step: StepTokens) -> Tensor:
        """Hidden states, float32 [T, D], or those of the last rows. ids_T: int32, contiguous."""
        num_rows = ids_T.shape[0]
        output_TD = torch.empty(num_rows, self._hidden_size)
        workspace = self._workspace(num_rows)
        arguments = self._arguments(step, (output_TD, workspace, ids_T))
        self._run(arguments.address)  # they stay until it is done
        return output_TD if step.last is None else output_TD[: step.num_outputs]

    def bind(self, ids_T: Tensor, step: StepTokens) -> BoundChoices:
        """Steps from these tokens (int32, contiguous) to the next ones; all tensors stay where they are."""
        num_rows = ids_T.shape[0]
        workspace = self._workspace(num_rows)
        chosen = ChosenTokens(torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool))
        arguments = self._arguments(step, (None, workspace, ids_T, *chosen))
        return BoundChoices(self._run, arguments, chosen, (self, ids_T, step, workspace))

    def _workspace(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows * self._plan.whole_size + min(num_rows, PROGRAM_ROWS) * self._plan.part_size)

    def _arguments(self, step: StepTokens, tensors: Sequence[Tensor | None]) -> StoredArguments:
        """tensors: output, workspace, ids, and where there is a choice, index and failed."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        addresses += [0] * (5 - len(addresses))
        return StoredArguments([*addresses, *step.arguments(torch.get_num_threads())])
