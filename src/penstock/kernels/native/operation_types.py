"""Descriptions of the C++ library's operations, as the library exports them (`csrc/operations.cpp`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch


class Scope(IntEnum):
    """Rows that an operation needs at once: any of them, or all of a step (attention)."""

    ROWS = 0
    STEP = 1


class Use(IntEnum):
    """Access of an operation to a row operand. READ_ANY, MAKE_ANY: optional."""

    NONE = 0
    READ = 1
    READ_ANY = 2
    CHANGE = 3
    OVERWRITE = 4
    MAKE = 5
    MAKE_ANY = 6


class FieldType(IntEnum):
    """Type of a constant argument. PACKED: a weight in the library's own layout."""

    FLOATS = 0
    PACKED = 1
    TENSOR = 2
    INT64 = 3
    INT32 = 4
    FLOAT = 5
    QUANTIZED_KERNELS = 6


@dataclass(frozen=True, slots=True)
class Field:
    """A constant argument of an operation. alignment: of a tensor, in bytes."""

    name: str
    type: FieldType
    alignment: int


@dataclass(frozen=True, slots=True)
class OperationType:
    """Description of an operation.

    x, second, out: row operands. input: dtype of the step input that it reads, an element per row; None for none.
    chooses: it produces a token per row.
    """

    number: int
    name: str
    scope: Scope
    x: Use = Use.NONE
    second: Use = Use.NONE
    out: Use = Use.NONE
    input: torch.dtype | None = None
    chooses: bool = False
    fields: tuple[Field, ...] = ()


_INPUT_DTYPES = None, torch.int32, torch.int64


def operation_types(module: Any) -> Mapping[str, OperationType]:
    """The library's operations by name."""
    types = {}
    for number, (name, scope, x, second, out, read, chooses, fields) in enumerate(module.operation_types()):
        types[name] = OperationType(
            number,
            name,
            Scope(scope),
            Use(x),
            Use(second),
            Use(out),
            _INPUT_DTYPES[read],
            bool(chooses),
            tuple(Field(field, FieldType(type_), alignment) for field, type_, alignment in fields),
        )
    return types
