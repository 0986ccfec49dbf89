"""Recorded programs: a traced forward pass as one C++ call. Suffixes: T tokens of the step, D hidden size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native import NativeKernels
from penstock.kernels.native.library import StoredArguments
from penstock.kernels.native.planning import Kind, plan_buffers
from penstock.kernels.native.program_step import StepTokens
from penstock.kernels.native.tracing import Cell, Opaque, Operation, Trace
from penstock.kernels.sampling import ChosenTokens

# Rows that pass from kernel to kernel together, between two operations of step scope: enough for products at full
# speed, few enough that a kernel's results are in the cache when the next one reads them.
PROGRAM_ROWS = 256

_NO_CELL = -1


class NativeProgram:
    """A program from step inputs to hidden states, or to tokens if the trace ends in a choice.

    It holds references to the traced weights and caches. It runs the same kernels as separate calls, with the same
    bits. A declared opaque operation splits it into segments, which run one after another.

    output: cell of the hidden states; None where tokens are chosen. further: cells of other outputs.
    """

    def __init__(self, kernels: NativeKernels, trace: Trace, output: Cell | None, further: Sequence[Cell] = ()) -> None:
        self._library = module = kernels.module
        self._program = module.program_new(kernels.instruction_set.index, PROGRAM_ROWS)
        # Takes the address of `_arguments`, and the range of operations to run.
        self._start: Callable[[int, int, int], tuple[int, int, int] | None]
        self._start = partial(module.bind("program_run"), self._program)
        self.inputs = trace.inputs
        self._names = list(trace.inputs)
        given = {found.cell: found.number for found in trace.inputs.values() if found.cell is not None}
        self._plan = plan_buffers(trace.operations, output, further, given)
        self._widths = [cell.width for cell in (output, *further) if cell is not None]
        self._keeps_alive = trace.keeps_alive
        numbers: dict[Cell | None, int] = {None: _NO_CELL}
        for cell, place in self._plan.places.items():
            numbers[cell] = module.program_buffer(self._program, place.kind, cell.width, place.offset)
        self._operations: list[Operation] = []
        # Position of each opaque operation among the others.
        self._opaques: list[tuple[int, Opaque]] = []
        for operation in trace.operations:
            if operation.type is None:
                assert operation.opaque is not None, "an operation is the library's or opaque"
                self._opaques.append((len(self._operations), operation.opaque))
                continue
            cells = [numbers[cell] for cell in operation.cells]
            flags = operation.input, operation.reads_last, operation.narrows
            module.program_add(self._program, operation.type.number, *cells, *flags, *operation.arguments)
            self._operations.append(operation)

    def measure(self, *, is_on: bool = True) -> None:
        """Begin to measure the time of each operation, from zero, or end it; not while the program runs."""
        self._library.program_measure(self._program, is_on)

    def operation_times(self) -> list[tuple[Operation, int]]:
        """Nanoseconds of each operation since `measure`, in their order; none while they are not measured."""
        times = self._library.program_times(self._program)
        return list(zip(self._operations, times, strict=True)) if times else []

    @property
    def num_segments(self) -> int:
        """Number of library calls per step."""
        return 1 + len(self._opaques)

    def run(self, step: StepTokens, context: Any = None) -> list[Tensor]:
        """Run a step: hidden states, float32 [T, D], or those of last tokens; then further outputs, of all tokens.

        context: of the forward pass, for opaque operations. Step inputs with rows may be overwritten.
        """
        num_rows = step.num_rows
        outputs = torch.empty(num_rows * sum(self._widths))
        workspace = self._workspace(num_rows)
        arguments = self._arguments(step, outputs, workspace)
        # The arguments must outlive the call.
        self._run(arguments.address, self._calls(step, context, outputs, workspace))
        hidden_TD, *further = self._split(outputs, num_rows)
        return [hidden_TD if step.last is None else hidden_TD[: step.num_outputs], *further]

    def bind(self, step: StepTokens, context: Any = None) -> BoundChoices:
        """Bind the program to these inputs and this context, for repeated steps to greedy tokens."""
        num_rows = step.num_rows
        workspace = self._workspace(num_rows)
        chosen = ChosenTokens(torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool))
        outputs = torch.empty(num_rows * sum(self._widths))
        arguments = self._arguments(step, outputs, workspace, chosen)
        calls = self._calls(step, context, outputs, workspace)
        states = self._split(outputs, num_rows)
        run = partial(self._run, arguments.address, calls)
        return BoundChoices(run, chosen, states, (arguments, step, workspace, outputs))

    def _split(self, outputs: Tensor, num_rows: int) -> list[Tensor]:
        """Split the outputs, [T, width] each."""
        if len(self._widths) == 1:
            return [outputs.view(num_rows, -1)]
        parts = outputs.split([num_rows * width for width in self._widths])
        return [part.view(num_rows, width) for part, width in zip(parts, self._widths, strict=True)]

    def _run(self, address: int, calls: Sequence[Callable[[], None]]) -> None:
        """Run all segments. Raises WaitTimeout or RanksDisagree for failed collectives."""
        begin = 0
        for (end, _), call in zip(self._opaques, calls, strict=True):
            self._run_segment(address, begin, end)
            call()
            begin = end
        self._run_segment(address, begin, len(self._operations))

    def _run_segment(self, address: int, begin: int, end: int) -> None:
        failure = self._start(address, begin, end)
        if failure:  # 0 for meta tensors
            index, num_rows, status = failure
            operation = self._operations[index]
            assert operation.collectives is not None, "no collectives"
            assert operation.type is not None, "only library operations fail"
            shape = [num_rows, *(cell.width for cell in operation.all_cells)]
            operation.collectives.fail(operation.type.name, torch.float32, shape, status)

    def _calls(self, step: StepTokens, context: Any, outputs: Tensor, workspace: Tensor) -> list[Callable[[], None]]:
        """Bind the step's opaque operations to their rows."""

        def rows(cell: Cell, num_rows: int) -> Tensor:
            place = self._plan.places[cell]
            if place.kind is Kind.INPUT:
                return step.inputs[self._names[place.offset]][:num_rows]
            memory = outputs if place.kind is Kind.OUTPUT else workspace
            return memory[place.offset * step.num_rows :][: num_rows * cell.width].view(num_rows, cell.width)

        calls: list[Callable[[], None]] = []
        for _, opaque in self._opaques:
            num_rows = step.num_outputs if opaque.is_last else step.num_rows
            read = [rows(cell, num_rows) for cell in opaque.read]
            made = [rows(cell, num_rows) for cell in opaque.made]
            calls.append(partial(_call_opaque, opaque.function, context, read, made))
        return calls

    def _workspace(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows * self._plan.whole_size + min(num_rows, PROGRAM_ROWS) * self._plan.part_size)

    def _arguments(
        self, step: StepTokens, outputs: Tensor, workspace: Tensor, chosen: ChosenTokens | None = None
    ) -> StoredArguments:
        choices = [0, 0] if chosen is None else [tensor.data_ptr() for tensor in chosen]
        tensors = outputs.data_ptr(), workspace.data_ptr(), *choices
        return StoredArguments([*tensors, *step.arguments(self._names, torch.get_num_threads())])


class BoundChoices:
    """A program to greedy tokens, bound to all its inputs and outputs.

    Every run overwrites the choices, and `states`, further outputs: float32 [T, width].
    """

    def __init__(
        self, run: Callable[[], None], chosen: ChosenTokens, states: Sequence[Tensor], keeps_alive: tuple[object, ...]
    ) -> None:
        self._run = run
        self._chosen = chosen
        self.states = states
        self._keeps_alive = keeps_alive

    def run(self) -> ChosenTokens:
        """Run one step on the tensors' present values. The next step overwrites the result."""
        self._run()
        return self._chosen


def _call_opaque(function: Callable[..., Any], context: Any, read: Sequence[Tensor], made: Sequence[Tensor]) -> None:
    for rows, result in zip(made, function(context, *read), strict=True):
        rows.copy_(result)
