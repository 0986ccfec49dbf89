"""Tracer of forward passes: records a model's forward as a program.

A forward pass is called once with traced tensors for the step's tensors. A library operation called with one records
itself and returns another for its result. Other computations on a traced tensor cannot be part of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MethodWrapperType
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.native.operation_types import Field, FieldType, OperationType, Scope

Argument = Tensor | int | float | None


class LibraryOperation(Protocol):
    """Operation of the library for one instruction set: what a trace needs of a `NativeOperation`."""

    @property
    def type(self) -> OperationType: ...

    @property
    def instruction_set(self) -> int: ...


class LibraryCollectives(Protocol):
    """Collectives of one rank: what a recorded operation needs of `Collectives`."""

    @property
    def arguments(self) -> tuple[int, ...]: ...

    def fail(self, name: str, dtype: torch.dtype, shape: Sequence[int], status: int) -> None: ...


class Untraceable(Exception):
    """Reason why a forward pass cannot be recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A row of `width` floats for every token: an operation's result."""

    width: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """A named step input of a program: an element of `dtype` per token, or a row of `width` floats.

    cell: of an input with rows.
    """

    number: int
    dtype: torch.dtype
    width: int = 0
    cell: Cell | None = None


@dataclass(frozen=True, slots=True)
class Opaque:
    """A declared opaque operation: a Python function called between two segments of a program.

    function: takes the step's forward context and rows, and returns rows for each cell in `made`.
    read: cells that it reads. is_last: its rows are narrowed to last tokens.
    """

    function: Callable[..., Any]
    read: tuple[Cell, ...]
    made: tuple[Cell, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """A recorded call of an operation.

    cells: (read and possibly changed, read, written).
    input: number of the step input that it reads, -1 for none. reads_last: it reads that input's elements of last
    tokens.
    narrows: it narrows the rows to last tokens, in a step with narrowed output.
    collectives: of the ranks that run it together. opaque: instead of a library operation.
    """

    type: OperationType | None
    cells: tuple[Cell | None, Cell | None, Cell | None] = (None, None, None)
    arguments: tuple[int | float, ...] = ()
    input: int = -1
    reads_last: bool = False
    narrows: bool = False
    collectives: LibraryCollectives | None = None
    opaque: Opaque | None = None

    @property
    def all_cells(self) -> list[Cell]:
        """All cells that it reads or writes."""
        if self.opaque is not None:
            return [*self.opaque.read, *self.opaque.made]
        return [cell for cell in self.cells if cell is not None]

    @property
    def needs_whole_step(self) -> bool:
        """Whether it needs the rows of all tokens at once."""
        return self.type is None or self.type.scope is Scope.STEP


@dataclass(frozen=True, slots=True)
class TracedRequests:
    """Traced requests of a KV-cache group, and traced metadata of its attention.

    group: the KV-cache group. is_last: of `ForwardContext.last`, to whose rows the program is narrowed there.
    """

    group: int
    is_last: bool = False
    num_tokens: int | None = None

    @property
    def requests(self) -> TracedRequests:
        return self

    def seeing(self, _: Tensor) -> TracedRequests:
        """As of `StepRequests`: a program's step says what its tokens see."""
        return self


class Role(Enum):
    """Kind of traced tensor.

    INPUT: a step input with an element per token. LAST: the rows of `ForwardContext.last`. ROWS: an operation's result,
    or a step input with rows. CHOSEN: tokens. FAILED: whether a row has none.
    """

    INPUT = auto()
    LAST = auto()
    ROWS = auto()
    CHOSEN = auto()
    FAILED = auto()


_DTYPES = {Role.ROWS: torch.float32, Role.FAILED: torch.bool}


class TracedTensor(Tensor):
    """Stand-in for a tensor of a step, without values and without a number of rows.

    cell: of rows; None for other roles, and for overwritten rows.
    is_last: it has a row per last token, not per token.
    input: number of the step input.
    share: this rank's shard in a lookup: first row, number of rows, and total; rows of other ranks are zero.
    """

    origin: Trace
    role: Role
    cell: Cell | None
    is_last: bool
    input: int = -1
    share: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _TOLD:
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        traced = _TRACED.get(function)
        if traced is None or kwargs or not isinstance(args[0], TracedTensor):
            # Of a property, its getter.
            named = function.__self__ if isinstance(function, MethodWrapperType) else function
            raise Untraceable(f"torch's {getattr(named, '__name__', named)} of a step's tensor is not a kernel")
        return traced(*args)


@dataclass(slots=True, eq=False)
class Trace:
    """The operations of a forward pass, in order.

    types: of the library. instruction_set: number of the one that all operations are for.
    inputs: named step inputs. keeps_alive: tensors whose addresses the operations hold.
    """

    types: Mapping[str, OperationType]
    instruction_set: int
    operations: list[Operation] = field(default_factory=list)
    inputs: dict[str, StepInput] = field(default_factory=dict)
    keeps_alive: list[Tensor] = field(default_factory=list)
    # Whether rows are narrowed to last tokens, and whether tokens have been chosen.
    _is_last: bool = False
    _has_choice: bool = False

    def input(self, name: str, dtype: torch.dtype, width: int = 0) -> TracedTensor:
        """Trace a named step input: [T] of this dtype, or [T, width] of floats, which may be overwritten."""
        number, cell = len(self.inputs), Cell(width) if width else None
        self.inputs[name] = StepInput(number, dtype, width, cell)
        made = self.stand_in(Role.ROWS if width else Role.INPUT, cell, dtype)
        made.input, made.is_last = number, False
        return made

    def last_rows(self) -> TracedTensor:
        """Trace the rows of last tokens."""
        return self.stand_in(Role.LAST)

    def stand_in(self, role: Role, cell: Cell | None = None, dtype: torch.dtype | None = None) -> TracedTensor:
        """Make a traced tensor: rows of a cell, [T, width], or an element per token, [T]."""
        shape = [0] if cell is None else [0, cell.width]
        dtype = dtype or _DTYPES.get(role, torch.int64)
        made = torch.empty(shape, dtype=dtype, device="cpu").as_subclass(TracedTensor)
        made.origin, made.role, made.cell, made.is_last = self, role, cell, self._is_last
        return made

    def add(
        self, operation: LibraryOperation, x: Tensor, width: int, arguments: Sequence[Argument], second: Tensor | None
    ) -> TracedTensor:
        """Record an operation from rows to rows of `width` floats."""
        out, added = Cell(width), None if second is None else self._cell(second)
        self._record(self._of(operation), (self._cell(x), added, out), arguments)
        return self.stand_in(Role.ROWS, out)

    def look_up(
        self, operation: LibraryOperation, ids_T: TracedTensor, width: int, arguments: Sequence[Argument]
    ) -> TracedTensor:
        """Record an operation from a step input to rows."""
        number = self._input_of(ids_T, self._of(operation))
        out = Cell(width)
        arguments = *ids_T.share, *arguments
        self._record(operation.type, (None, None, out), arguments, input=number, reads_last=ids_T.is_last)
        return self.stand_in(Role.ROWS, out)

    def add_to(
        self, operation: LibraryOperation, out: Tensor, x: Tensor, ids_T: Tensor, arguments: Sequence[Argument]
    ) -> Tensor:
        """Record an operation that changes rows in place, by other rows and a step input."""
        type_ = self._of(operation)
        number, is_last = self._input_of(ids_T, type_), self._is_last
        cells = self._cell(x), None, self._cell(out)
        self._record(type_, cells, arguments, input=number, reads_last=is_last)
        return out

    def choose(
        self, operation: LibraryOperation, x: TracedTensor, arguments: Sequence[Argument], *, with_largest: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Record an operation that chooses the step's tokens."""
        if self._has_choice:
            raise Untraceable("tokens are chosen twice")
        self._has_choice = True
        largest = Cell(1) if with_largest else None
        self._record(self._of(operation), (self._cell(x), None, largest), arguments)
        values = None if largest is None else self.stand_in(Role.ROWS, largest)
        return self.stand_in(Role.CHOSEN), self.stand_in(Role.FAILED), values

    def merge_choices(
        self, largest: TracedTensor, first_token: int, collectives: LibraryCollectives
    ) -> tuple[Tensor, Tensor]:
        """Record the merge of all ranks' choices. first_token: start of this rank's vocabulary shard."""
        cells = self._cell(largest), None, None
        self._record(self.types["merge_choices"], cells, (*collectives.arguments, first_token), collectives=collectives)
        return self.stand_in(Role.CHOSEN), self.stand_in(Role.FAILED)

    def scale(self, x: TracedTensor, factor: float) -> TracedTensor:
        """Record an in-place multiplication of rows by a factor."""
        self._record(self.types["scale"], (self._cell(x), None, None), (factor,))
        return x

    def all_reduce(self, x: TracedTensor, collectives: LibraryCollectives) -> TracedTensor:
        """Record an all-reduce, in place."""
        cells = self._cell(x), None, None
        self._record(self.types["all_reduce"], cells, collectives.arguments, collectives=collectives)
        return x

    def attend(
        self,
        qkv_TX: TracedTensor,
        width: int,
        requests: TracedRequests,
        positions_T: Tensor,
        kv_cache: Tensor,
        arguments: Sequence[Argument],
        collectives: LibraryCollectives | None = None,
        operation: str = "attention",
    ) -> TracedTensor:
        """Record attention from the output of the QKV projection, which it overwrites.

        collectives: of decode context parallel ranks. operation: the library's.
        """
        if self._is_last:
            raise Untraceable("an attention follows the one that leaves last tokens")
        type_ = self.types[operation]
        number = self._input_of(positions_T, type_)
        cell, out = self._cell(qkv_TX), Cell(width)
        qkv_TX.cell = None
        self.keeps_alive.append(kv_cache)
        arguments = (requests.group, requests.is_last, *arguments)
        self._record(
            type_, (cell, None, out), arguments, input=number, narrows=requests.is_last, collectives=collectives
        )
        return self.stand_in(Role.ROWS, out)

    def over_requests(
        self, operation: str, x: Tensor, width: int, arguments: Sequence[Argument], second: Tensor | None = None
    ) -> TracedTensor:
        """Record an operation over the step's requests in a KV-cache group, the first argument."""
        if self._is_last:
            raise Untraceable(f"{operation} follows the operation that leaves last tokens")
        out = Cell(width)
        cells = self._cell(x), None if second is None else self._cell(second), out
        self._record(self.types[operation], cells, arguments)
        return self.stand_in(Role.ROWS, out)

    def attend_texts(
        self,
        qkv_TX: TracedTensor,
        width: int,
        requests: TracedRequests,
        positions_T: Tensor | None,
        arguments: Sequence[Argument],
    ) -> TracedTensor:
        """Record attention over whole texts from the output of the QKV projection, which it overwrites.

        positions_T: None without rotary embedding.
        """
        if self._is_last:
            raise Untraceable("an attention follows the one that leaves last tokens")
        type_ = self.types["encoder_attention"]
        number = -1 if positions_T is None else self._input_of(positions_T, type_)
        cell, out = self._cell(qkv_TX), Cell(width)
        qkv_TX.cell = None
        self._record(type_, (cell, None, out), (requests.group, False, *arguments), input=number)
        return self.stand_in(Role.ROWS, out)

    def keep_last(self, per_token: TracedTensor) -> TracedTensor:
        """Narrow to the rows of last tokens; `per_token` is consumed. The first such call narrows the program."""
        if per_token.is_last:
            raise Untraceable("last rows are selected twice")
        if per_token.role is Role.INPUT:
            made = self.stand_in(Role.INPUT, dtype=per_token.dtype)
            made.input, made.share, made.is_last = per_token.input, per_token.share, True
            return made
        cell = per_token.cell
        if cell is None or per_token.origin is not self:
            raise Untraceable("last rows are selected of something that no kernel made")
        per_token.cell = None
        type_ = self.types["keep_last" if self._is_last else "narrow"]
        self._record(type_, (cell, None, None), narrows=not self._is_last)
        return self.stand_in(Role.ROWS, cell)

    def share_of(self, ids_T: TracedTensor, start: int, size: int, whole: int) -> TracedTensor:
        """Mark a step input as looked up in this rank's shard of rows, from `start` on."""
        made = self.stand_in(ids_T.role, dtype=ids_T.dtype)
        made.share, made.input, made.is_last = (start, size, whole), ids_T.input, ids_T.is_last
        return made

    def call_opaque(self, function: Callable[..., Any], rows: Sequence[Tensor], widths: Sequence[int]) -> list[Tensor]:
        """Record a declared opaque operation, which ends a segment. widths: of the rows that it returns."""
        made = tuple(map(Cell, widths))
        opaque = Opaque(function, tuple(map(self._cell, rows)), made, self._is_last)
        self.operations.append(Operation(None, opaque=opaque))
        return [self.stand_in(Role.ROWS, cell) for cell in made]

    def result(self, tensor: object) -> Cell:
        """Return the cell of a forward pass's result. Raises Untraceable for anything but traced rows."""
        if not isinstance(tensor, Tensor) or not self._is_last or self._has_choice:
            raise Untraceable("not all hidden states come of kernels, of last tokens where these are asked for")
        return self._cell(tensor)

    def _of(self, operation: LibraryOperation) -> OperationType:
        if operation.instruction_set != self.instruction_set:
            raise Untraceable("a weight is packed for other kernels")
        return operation.type

    def _input_of(self, tensor: Tensor, type_: OperationType) -> int:
        if not isinstance(tensor, TracedTensor) or tensor.origin is not self or tensor.role is not Role.INPUT:
            raise Untraceable(f"{type_.name} reads something else than a step input")
        if tensor.dtype is not type_.input:
            raise Untraceable(f"{type_.name} reads a step input of {tensor.dtype}, not of {type_.input}")
        if tensor.is_last is not self._is_last and type_.name != "attention":
            raise Untraceable("rows are looked up for all tokens where last tokens alone go on")
        return tensor.input

    def _cell(self, tensor: Tensor) -> Cell:
        if not isinstance(tensor, TracedTensor) or tensor.origin is not self or tensor.cell is None:
            raise Untraceable("a kernel reads something that does not come of another one")
        if tensor.is_last is not self._is_last:
            raise Untraceable("after the last attention a kernel reads rows of all tokens")
        return tensor.cell

    def _record(
        self,
        type_: OperationType,
        cells: tuple[Cell | None, Cell | None, Cell | None],
        arguments: Sequence[Argument] = (),
        *,
        input: int = -1,
        reads_last: bool = False,
        narrows: bool = False,
        collectives: LibraryCollectives | None = None,
    ) -> None:
        """Record a call. Raises Untraceable for an argument that does not match the operation's fields."""
        numbers = tuple(self._number(of_field, value) for of_field, value in zip(type_.fields, arguments, strict=True))
        self.operations.append(Operation(type_, cells, numbers, input, reads_last, narrows, collectives))
        self._is_last |= narrows

    def _number(self, of_field: Field, argument: Argument) -> int | float:
        if not isinstance(argument, Tensor):
            return 0 if argument is None else argument
        if isinstance(argument, TracedTensor):
            raise Untraceable(f"a kernel takes a step's tensor for its {of_field.name}")
        if of_field.type is FieldType.FLOATS and not (argument.dtype is torch.float32 and argument.is_contiguous()):
            raise Untraceable(f"a kernel's {of_field.name} is in {argument.dtype}")
        address = argument.data_ptr()
        if address % of_field.alignment:
            raise Untraceable(f"a kernel's {of_field.name} does not lie on {of_field.alignment} bytes")
        self.keeps_alive.append(argument)
        return address


def _scale(x: TracedTensor, factor: object) -> TracedTensor:
    if not isinstance(factor, float):
        raise Untraceable("rows are multiplied by other rows")
    return x.origin.scale(x, factor)


def _select(x: TracedTensor, dimension: int, rows: Tensor) -> TracedTensor:
    if dimension != 0 or not isinstance(rows, TracedTensor) or rows.role is not Role.LAST:
        raise Untraceable("other rows than the last ones are selected")
    return x.origin.keep_last(x)


def _convert(x: TracedTensor, *to: object) -> TracedTensor:
    if len(to) != 1 or to[0] is not x.dtype:
        raise Untraceable("a step's tensor is converted")
    return x


# Properties that traced tensors have.
_TOLD = {
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    Tensor.dim,
    Tensor.stride,
    Tensor.is_contiguous,
}
# Torch operators that can be recorded.
_TRACED: dict[Callable[..., Any], Callable[..., TracedTensor]] = {
    Tensor.mul_: _scale,
    Tensor.index_select: _select,
    Tensor.to: _convert,
}
