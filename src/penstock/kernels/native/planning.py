"""Buffer planning of recorded programs: cells with disjoint lifetimes share memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

from penstock.kernels.native.tracing import Cell, Operation

NO_INPUTS: Mapping[Cell, int] = MappingProxyType({})


class Kind(IntEnum):
    """Kind of a buffer, as numbered by the library (`csrc/program.h`).

    WHOLE: rows of all tokens. PART: rows processed at once between two operations of step scope. OUTPUT: the program's
    outputs, one after another. INPUT: a step input with rows.
    """

    WHOLE = 0
    PART = 1
    OUTPUT = 2
    INPUT = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a cell. offset: in floats per row, within all places of its kind; for INPUT, the input's number."""

    kind: Kind
    offset: int


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """whole_size, part_size: floats per row of all places of a kind."""

    places: Mapping[Cell, Place]
    whole_size: int
    part_size: int


@dataclass(slots=True)
class _Use:
    """Lifetime of a cell: the first and the last operation that uses it."""

    cell: Cell
    first: int
    last: int

    def overlaps(self, other: _Use) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(slots=True)
class _Room:
    """A place shared by cells of one width with disjoint lifetimes."""

    width: int
    place: Place
    uses: list[_Use] = field(default_factory=list)


def plan_buffers(
    operations: Sequence[Operation],
    output: Cell | None,
    further: Sequence[Cell] = (),
    inputs: Mapping[Cell, int] = NO_INPUTS,
) -> BufferPlan:
    """Plan the places of all cells.

    output: hidden states in the caller's memory; None for none. further: other outputs, after them. inputs: numbers of
    step inputs, by their cells.
    """
    uses = _uses(operations, output)
    places = {cell: Place(Kind.INPUT, number) for cell, number in inputs.items()}
    size = 0 if output is None else output.width
    for cell in further:
        places[cell] = Place(Kind.OUTPUT, size)
        size += cell.width
    uses = {cell: use for cell, use in uses.items() if cell not in places}
    of_whole_steps = [index for index, operation in enumerate(operations) if operation.needs_whole_step]
    whole: list[_Use] = []
    part: list[_Use] = []
    for use in uses.values():
        is_whole = bisect_left(of_whole_steps, use.first) < bisect_right(of_whole_steps, use.last)
        (whole if is_whole or use.cell is output else part).append(use)
    whole_places, whole_size = _place_whole(whole, output)
    part_places, part_size = _place_parts(part)
    return BufferPlan(places | whole_places | part_places, whole_size, part_size)


def _uses(operations: Sequence[Operation], output: Cell | None) -> dict[Cell, _Use]:
    """Lifetimes by cell, in the order of their first operations."""
    uses: dict[Cell, _Use] = {}
    for index, operation in enumerate(operations):
        for cell in operation.all_cells:
            uses.setdefault(cell, _Use(cell, index, index)).last = index
    if output is not None:
        uses[output].last = len(operations)
    return uses


def _place_whole(uses: Sequence[_Use], output: Cell | None) -> tuple[dict[Cell, Place], int]:
    """Place cells of all tokens' rows.

    Between two operations of step scope the first rows pass through all kernels before the next ones. So a place is
    shared by cells of one width only, whose rows have the same addresses: writing the first rows leaves the next ones
    intact.
    """
    rooms: list[_Room] = []
    size = 0
    for use in sorted(uses, key=lambda use: use.cell is not output):
        width = use.cell.width
        room = next((room for room in rooms if room.width == width and not _is_taken(room, use)), None)
        if room is None:
            place = Place(Kind.OUTPUT, 0) if use.cell is output else Place(Kind.WHOLE, size)
            size += 0 if use.cell is output else width
            room = _Room(width, place)
            rooms.append(room)
        room.uses.append(use)
    return {use.cell: room.place for room in rooms for use in room.uses}, size


def _is_taken(room: _Room, use: _Use) -> bool:
    return any(use.overlaps(other) for other in room.uses)


def _place_parts(uses: Sequence[_Use]) -> tuple[dict[Cell, Place], int]:
    """Place the widest cells first, each at the lowest offset that is free during its lifetime."""
    places: dict[Cell, Place] = {}
    size = 0
    for neighbours in _connected(uses):
        placed: list[_Use] = []
        for use in sorted(neighbours, key=lambda use: -use.cell.width):
            offset = 0
            for other in sorted(placed, key=lambda other: places[other.cell].offset):
                begin, width = places[other.cell].offset, other.cell.width
                if use.overlaps(other) and begin < offset + use.cell.width:
                    offset = max(offset, begin + width)
            places[use.cell] = Place(Kind.PART, offset)
            placed.append(use)
            size = max(size, offset + use.cell.width)
    return places, size


def _connected(uses: Sequence[_Use]) -> Iterator[list[_Use]]:
    """Split lifetimes, sorted by first operation, into runs without overlaps between runs."""
    run: list[_Use] = []
    for use in uses:
        if run and use.first > max(other.last for other in run):
            yield run
            run = []
        run.append(use)
    yield run
