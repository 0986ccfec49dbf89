"""Buffer planning of programs: no cell is overwritten while it is needed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.native.operation_types import OperationType, Scope
from penstock.kernels.native.planning import BufferPlan, Kind, plan_buffers
from penstock.kernels.native.tracing import Cell, Operation

NUM_ROWS, ROWS_AT_ONCE = 5, 2
OF_ROWS, OF_STEP = OperationType(0, "rows", Scope.ROWS), OperationType(1, "step", Scope.STEP)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Operation], Cell]:
    """Operations that read what was made before, write something new, and may write to what they read."""
    made = [Cell(draw(st.integers(1, 4)))]
    operations = [Operation(OF_ROWS, (None, None, made[0]))]
    for _ in range(draw(st.integers(0, 14))):
        kernel = draw(st.sampled_from([OF_ROWS, OF_ROWS, OF_STEP]))
        read = draw(st.lists(st.sampled_from(made[-5:]), min_size=1, max_size=2, unique=True))
        made.append(Cell(draw(st.integers(1, 4))))
        operations.append(Operation(kernel, (read[0], read[1] if len(read) > 1 else None, made[-1])))
    return operations, draw(st.sampled_from(made))


class Memory:
    """Addresses as the library has them (`csrc/program.cpp`), and what was last written to each."""

    def __init__(self, plan: BufferPlan) -> None:
        self._plan = plan
        self._written: dict[tuple[bool, int], tuple[Cell, int, int]] = {}

    def _addresses(self, cell: Cell, row: int, first_row: int) -> list[tuple[bool, int]]:
        place = self._plan.places[cell]
        if place.kind is Kind.PART:
            begin = self._plan.whole_size * NUM_ROWS + place.offset * ROWS_AT_ONCE + (row - first_row) * cell.width
        else:
            begin = place.offset * NUM_ROWS + row * cell.width
        return [(place.kind is Kind.OUTPUT, begin + index) for index in range(cell.width)]

    def write(self, cell: Cell, row: int, first_row: int) -> None:
        for index, address in enumerate(self._addresses(cell, row, first_row)):
            self._written[address] = (cell, row, index)

    def holds(self, cell: Cell, row: int, first_row: int = 0) -> bool:
        addresses = self._addresses(cell, row, first_row)
        return all(self._written[address] == (cell, row, index) for index, address in enumerate(addresses))

    def is_within(self, plan: BufferPlan, output: Cell) -> bool:
        sizes = {False: plan.whole_size * NUM_ROWS + plan.part_size * ROWS_AT_ONCE, True: output.width * NUM_ROWS}
        return all(at < sizes[is_output] for is_output, at in self._written)


@given(programs())
@settings(deadline=None, max_examples=300)
def test_every_operation_finds_what_it_reads(program: tuple[list[Operation], Cell]) -> None:
    operations, output = program
    plan = plan_buffers(operations, output)
    memory = Memory(plan)
    run: list[Operation] = []
    for operation in [*operations, None]:
        if operation is not None and not operation.needs_whole_step:
            run.append(operation)
            continue
        for first in range(0, NUM_ROWS, ROWS_AT_ONCE):
            for of_part in run:
                apply(memory, of_part, range(first, min(first + ROWS_AT_ONCE, NUM_ROWS)), first)
        run = []
        if operation is not None:
            apply(memory, operation, range(NUM_ROWS), 0)
    assert all(memory.holds(output, row) for row in range(NUM_ROWS))
    assert memory.is_within(plan, output)


def apply(memory: Memory, operation: Operation, rows: range, first_row: int) -> None:
    *read, out = [cell for cell in operation.cells if cell is not None]
    for cell in read:
        assert all(memory.holds(cell, row, first_row) for row in rows)
    for cell in (*read, out):
        for row in rows:
            memory.write(cell, row, first_row)


def test_layers_share_their_buffers() -> None:
    """As much as one layer needs, however many there are: attention's input and result, and the widest moment between
    two attentions. The residual stream is kept in the output.
    """
    hidden, qkv, mixed, inner = 8, 12, 8, 20
    plan = plan_buffers(*llama(3, hidden, qkv, mixed, inner))
    assert plan.whole_size == qkv + mixed
    assert plan.part_size == hidden + 3 * inner
    assert plan_buffers(*llama(30, hidden, qkv, mixed, inner)) != plan
    assert plan_buffers(*llama(30, hidden, qkv, mixed, inner)).whole_size == plan.whole_size


def llama(num_layers: int, hidden: int, qkv: int, mixed: int, inner: int) -> tuple[list[Operation], Cell]:
    operations: list[Operation] = []

    def add(kernel: OperationType, width: int, x: Cell | None, residual: Cell | None = None) -> Cell:
        out = Cell(width)
        operations.append(Operation(kernel, (x, residual, out)))
        return out

    x, residual = add(OF_ROWS, hidden, None), None
    for _ in range(num_layers):
        normed = add(OF_ROWS, hidden, x, residual)
        residual = x
        x = add(OF_ROWS, hidden, add(OF_STEP, mixed, add(OF_ROWS, qkv, normed)))
        normed = add(OF_ROWS, hidden, x, residual)
        residual = x
        x = add(OF_ROWS, hidden, add(OF_ROWS, inner, add(OF_ROWS, 2 * inner, normed)))
    assert residual is not None
    return operations, add(OF_ROWS, hidden, x, residual)
