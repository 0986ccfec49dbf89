"""Kernels that are noted down instead of run: how a model's forward becomes a program.

A forward pass is called once with stand-ins for the step's tensors. A kernel of the library that is handed one adds
itself to the trace, and returns another for its result. What else is done to a stand-in cannot be part of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native.meetings import Meetings

Argument = Tensor | int | float | None


class Untraceable(Exception):
    """Why a forward pass cannot become a program."""


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """Room for a result: a row of `width` floats for every token."""

    width: int


class Kernel(IntEnum):
    """In the order in which the library has them (`csrc/program.h`)."""

    NORM = 0
    GATE = 1
    LINEAR = 2
    QUANTIZED_LINEAR = 3
    ATTENTION = 4
    LOOKUP = 5
    ROWS = 6
    QUANTIZED_ROWS = 7
    SCALE = 8
    KEEP_LAST = 9
    GREEDY = 10
    ARGMAX = 11
    SUM = 12
    CONCATENATE = 13
    ALL_REDUCE = 14
    MERGE_CHOICES = 15


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel's call. cells: the rows that it reads and may change, others that it reads, and what it makes.

    meetings: where ranks do it together.
    """

    kernel: Kernel
    cells: tuple[Cell | None, Cell | None, Cell | None]
    arguments: tuple[int | float, ...] = ()
    meetings: Meetings | None = None


@dataclass(frozen=True, slots=True)
class TracedRequests:
    """Stands for the metadata of a step's attention.

    group: the KV-cache group. is_last: of `ForwardContext.last`, with whose rows alone the step goes on from there.
    """

    group: int
    is_last: bool = False
    # As in a step's own metadata, but for that it is not known.
    num_tokens: int | None = None


class Role(Enum):
    """What a stand-in is in a step.

    LAST: the rows of `ForwardContext.last`. ROWS: a kernel's result. CHOSEN: tokens. FAILED: whether there are none.
    """

    TOKENS = auto()
    POSITIONS = auto()
    LAST = auto()
    ROWS = auto()
    CHOSEN = auto()
    FAILED = auto()


_DTYPES = {Role.TOKENS: torch.int32, Role.ROWS: torch.float32, Role.FAILED: torch.bool}


class TracedTensor(Tensor):
    """Stands for a tensor of a step: what tells one from another, and no values. No number of rows can be asked for.

    cell: where rows are; None for other roles, and for what was overwritten.
    is_last: it has a row for every last token that is asked for, not for every token.
    share: of tokens, the first that are looked up, how many, and of how many in all; rows of others are zero.
    """

    origin: Trace
    role: Role
    cell: Cell | None
    is_last: bool
    share: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _TOLD:
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        traced = _TRACED.get(function)
        if traced is None or kwargs or not isinstance(args[0], TracedTensor):
            raise Untraceable(f"torch's {getattr(function, '__name__', function)} of a step's tensor is no kernel")
        return traced(*args)


class Trace:
    """What a forward pass does, in order.

    instruction_set: as the library knows it; of all kernels but those of quantised weights, which name their own.
    keeps_alive: what the operations have addresses of. given: rows that the caller brings in every step, if any.
    """

    def __init__(self, instruction_set: int) -> None:
        self.instruction_set = instruction_set
        self.operations: list[Operation] = []
        self.keeps_alive: list[Tensor] = []
        self.given: Cell | None = None
        # Whether an attention has left the rows of last tokens alone, and whether tokens have been chosen.
        self._is_last = False
        self._has_choice = False

    def stand_in(self, role: Role, cell: Cell | None = None) -> TracedTensor:
        """For a tensor of the step: the rows of a cell, [T, width], or a number or a truth value for each, [T]."""
        shape = [0] if cell is None else [0, cell.width]
        made = torch.empty(shape, dtype=_DTYPES.get(role, torch.int64), device="cpu").as_subclass(TracedTensor)
        made.origin, made.role, made.cell, made.is_last = self, role, cell, self._is_last
        return made

    def give(self, width: int) -> TracedTensor:
        """For rows that the caller brings in every step, and that may be overwritten."""
        self.given = Cell(width)
        return self.stand_in(Role.ROWS, self.given)

    def look_up(self, kernel: Kernel, ids_T: Tensor, width: int, *arguments: Argument) -> TracedTensor:
        """An operation that makes rows of the step's tokens."""
        if not isinstance(ids_T, TracedTensor) or ids_T.role is not Role.TOKENS or self._is_last:
            raise Untraceable("rows are looked up by something else than the step's tokens")
        return self._make(kernel, width, (*ids_T.share, *arguments))

    def share_of(self, ids_T: TracedTensor, start: int, size: int, whole: int) -> TracedTensor:
        """The step's tokens, of which a rank looks up those from start on."""
        made = self.stand_in(ids_T.role)
        made.share = start, size, whole
        return made

    def add(
        self, kernel: Kernel, x: Tensor, width: int, *arguments: Argument, residual: Tensor | None = None
    ) -> TracedTensor:
        """An operation that makes rows of so many floats of other rows. residual: what else it reads.

        A norm adds it to the others first, in place.
        """
        added = None if residual is None else self._cell(residual)
        return self._make(kernel, width, arguments, self._cell(x), added)

    def scale(self, x: TracedTensor, factor: float) -> TracedTensor:
        """Multiply rows in place."""
        self._note(Kernel.SCALE, (self._cell(x), None, None), (factor,))
        return x

    def all_reduce(self, x: TracedTensor, meetings: Meetings) -> TracedTensor:
        """Add up the rows of all ranks, in place."""
        self._note(Kernel.ALL_REDUCE, (self._cell(x), None, None), meetings.arguments, meetings)
        return x

    def attend(
        self,
        qkv_TX: TracedTensor,
        width: int,
        requests: TracedRequests,
        kv_cache: Tensor,
        *arguments: Argument,
        meetings: Meetings | None = None,
    ) -> TracedTensor:
        """An attention from the output of the projections, which it overwrites.

        meetings: where ranks do it together.
        """
        if self._is_last:
            raise Untraceable("there is an attention after the one that leaves last tokens")
        cell = self._cell(qkv_TX)
        qkv_TX.cell = None
        self.keeps_alive.append(kv_cache)
        self._is_last = requests.is_last
        arguments = (requests.group, requests.is_last, *arguments)
        return self._make(Kernel.ATTENTION, width, arguments, cell, meetings=meetings)

    def keep_last(self, per_token: TracedTensor) -> TracedTensor:
        """The rows of last tokens, beside or after the attention that has left these; `per_token` is gone."""
        cell = per_token.cell
        if cell is None or per_token.is_last or not self._is_last:
            raise Untraceable("last rows are selected elsewhere than after the last attention")
        per_token.cell = None
        self._note(Kernel.KEEP_LAST, (cell, None, None))
        return self.stand_in(Role.ROWS, cell)

    def choose(
        self, kernel: Kernel, x: TracedTensor, *arguments: Argument, largest: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """An operation that chooses the step's tokens and says where there are none.

        largest: of `room_for_largest`, where the chosen ones' values are written.
        """
        if self._has_choice:
            raise Untraceable("tokens are chosen twice")
        self._has_choice = True
        self._note(kernel, (self._cell(x), None, None if largest is None else self._cell(largest)), arguments)
        return self.stand_in(Role.CHOSEN), self.stand_in(Role.FAILED)

    def room_for_largest(self) -> TracedTensor:
        """A value for every row."""
        return self.stand_in(Role.ROWS, Cell(1))

    def merge_choices(self, largest: TracedTensor, first_token: int, meetings: Meetings) -> tuple[Tensor, Tensor]:
        """What all ranks have chosen becomes one choice. first_token: of those that this rank chooses from."""
        self._note(
            Kernel.MERGE_CHOICES, (self._cell(largest), None, None), (*meetings.arguments, first_token), meetings
        )
        return self.stand_in(Role.CHOSEN), self.stand_in(Role.FAILED)

    def result(self, tensor: object) -> Cell:
        """Where the rows are that a forward pass returned. Raises Untraceable for anything else that it may return."""
        if not isinstance(tensor, Tensor) or not self._is_last or self._has_choice:
            raise Untraceable("not all hidden states come of kernels, of last tokens where these are asked for")
        return self._cell(tensor)

    def _cell(self, tensor: Tensor) -> Cell:
        if not isinstance(tensor, TracedTensor) or tensor.origin is not self or tensor.cell is None:
            raise Untraceable("a kernel reads something that does not come of another one")
        if tensor.is_last is not self._is_last:
            raise Untraceable("after the last attention a kernel reads rows of all tokens")
        return tensor.cell

    def _make(
        self,
        kernel: Kernel,
        width: int,
        arguments: Sequence[Argument],
        x: Cell | None = None,
        residual: Cell | None = None,
        meetings: Meetings | None = None,
    ) -> TracedTensor:
        out = Cell(width)
        self._note(kernel, (x, residual, out), arguments, meetings)
        return self.stand_in(Role.ROWS, out)

    def _note(
        self,
        kernel: Kernel,
        cells: tuple[Cell | None, Cell | None, Cell | None],
        arguments: Sequence[Argument] = (),
        meetings: Meetings | None = None,
    ) -> None:
        self.operations.append(Operation(kernel, cells, tuple(map(self._number, arguments)), meetings))

    def _number(self, argument: Argument) -> int | float:
        if not isinstance(argument, Tensor):
            return 0 if argument is None else argument
        if isinstance(argument, TracedTensor):
            raise Untraceable("a kernel takes a step's tensor for a weight")
        self.keeps_alive.append(argument)
        return argument.data_ptr()


def floats(tensor: Tensor | None) -> Tensor | None:
    """A weight that the kernels read as float32. Raises Untraceable for another one."""
    if tensor is not None and not (tensor.dtype is torch.float32 and tensor.is_contiguous()):
        raise Untraceable(f"a weight is in {tensor.dtype}")
    return tensor


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


# What may be asked of a stand-in.
_TOLD = {
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    Tensor.dim,
    Tensor.stride,
    Tensor.is_contiguous,
}
# The operators of torch that a program knows.
_TRACED: dict[Callable[..., Any], Callable[..., TracedTensor]] = {
    Tensor.mul_: _scale,
    Tensor.index_select: _select,
    Tensor.to: _convert,
}
