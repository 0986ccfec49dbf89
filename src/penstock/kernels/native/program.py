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
    the results have the same bits. output: what the hidden states are in; None where tokens are chosen. further: what
    else is wanted.
    """

    def __init__(self, kernels: NativeKernels, trace: Trace, output: Cell | None, further: Sequence[Cell] = ()) -> None:
        module = kernels.module
        self._program = module.program_new(kernels.instruction_set.index, PROGRAM_ROWS)
        # Takes the address of what `_arguments` makes.
        self._start: Callable[[int], tuple[int, int, int] | None] = partial(module.program_run, self._program)
        self._operations = trace.operations
        self._plan = plan_buffers(trace.operations, output, further, trace.given)
        self._widths = [cell.width for cell in (output, *further) if cell is not None]
        self._keeps_alive = trace.keeps_alive
        numbers: dict[Cell | None, int] = {None: _NO_CELL}
        for cell, place in self._plan.places.items():
            numbers[cell] = module.program_buffer(self._program, place.kind, cell.width, place.offset)
        for operation in trace.operations:
            cells = [numbers[cell] for cell in operation.cells]
            module.program_add(self._program, operation.kernel, *cells, *operation.arguments)

    def __call__(self, ids_T: Tensor, step: StepTokens) -> Tensor:
        """Hidden states alone, of a program that is given none."""
        return self.run(ids_T, step)[0]

    def run(self, ids_T: Tensor, step: StepTokens, given_TD: Tensor | None = None) -> list[Tensor]:
        """Hidden states, float32 [T, D], or those of the last rows; then what else is wanted, of all rows.

        ids_T: int32, contiguous. given_TD: float32, contiguous, where rows are given; they may be overwritten.
        """
        num_rows = ids_T.shape[0]
        outputs = torch.empty(num_rows * sum(self._widths))
        workspace = self._workspace(num_rows)
        arguments = self._arguments(step, (outputs, workspace, ids_T, None, None, given_TD))
        self._run(arguments.address)  # they stay until it is done
        hidden_TD, *further = self._split(outputs, num_rows)
        return [hidden_TD if step.last is None else hidden_TD[: step.num_outputs], *further]

    def bind(self, ids_T: Tensor, step: StepTokens, given_TD: Tensor | None = None) -> BoundChoices:
        """Steps from these tokens (int32, contiguous) to the next ones; all tensors stay where they are.

        given_TD: as in `run`.
        """
        num_rows = ids_T.shape[0]
        workspace = self._workspace(num_rows)
        chosen = ChosenTokens(torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool))
        outputs = torch.empty(num_rows * sum(self._widths))
        arguments = self._arguments(step, (outputs, workspace, ids_T, *chosen, given_TD))
        states = self._split(outputs, num_rows)
        return BoundChoices(self._run, arguments, chosen, states, (self, ids_T, step, workspace, outputs, given_TD))

    def _split(self, outputs: Tensor, num_rows: int) -> list[Tensor]:
        """Each [T, width]."""
        if len(self._widths) == 1:
            return [outputs.view(num_rows, -1)]
        parts = outputs.split([num_rows * width for width in self._widths])
        return [part.view(num_rows, width) for part, width in zip(parts, self._widths, strict=True)]

    def _run(self, address: int) -> None:
        """Raises WaitTimeout or RanksDisagree where ranks do not meet."""
        failure = self._start(address)
        if failure:  # 0 where tensors have no memory
            index, num_rows, status = failure
            operation = self._operations[index]
            assert operation.meetings is not None, "no others meet"
            shape = [num_rows, *(cell.width for cell in operation.cells if cell is not None)]
            operation.meetings.fail(operation.kernel.name.lower(), torch.float32, shape, status)

    def _workspace(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows * self._plan.whole_size + min(num_rows, PROGRAM_ROWS) * self._plan.part_size)

    def _arguments(self, step: StepTokens, tensors: Sequence[Tensor | None]) -> StoredArguments:
        """tensors: output, workspace, ids; then index and failed where there is a choice, and rows that are given."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        addresses += [0] * (6 - len(addresses))
        return StoredArguments([*addresses, *step.arguments(torch.get_num_threads())])
