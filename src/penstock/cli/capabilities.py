"""`penstock env --capabilities`: features by parallelism and device, as tables or JSON."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from typing import TypeAlias

from penstock.worker.capabilities import (
    ARRANGEMENT_GROUPS,
    ARRANGEMENTS,
    DEVICES,
    FEATURES,
    Arrangement,
    Feature,
    refusal_of,
)
from penstock.worker.capabilities.arrangements import MEANINGS

# By device, feature and arrangement: True, or the refusal.
Cells: TypeAlias = dict[str, dict[str, dict[str, bool | str]]]
_WIDTH = 150


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """Capabilities of one device. columns: its arrangements, by group. marks: "yes" or the number of a reason, by
    feature and arrangement. absent: arrangements without support, with such a number. reasons: numbered from 1.
    """

    columns: dict[str, list[str]]
    marks: dict[str, dict[str, str]]
    absent: dict[str, str]
    reasons: list[str]


def cells() -> Cells:
    """Return all capabilities as data."""

    def of_feature(feature: Feature, device: str) -> dict[str, bool | str]:
        return {arrangement.name: _cell(feature, arrangement, device) for arrangement in ARRANGEMENTS}

    features = [feature for group in FEATURES.values() for feature in group]
    return {device: {feature.name: of_feature(feature, device) for feature in features} for device in DEVICES}


def table_of(device: str) -> DeviceTable:
    """Return the table of a device."""
    of_device = cells()[device]
    reasons: list[str] = []

    def mark(cell: bool | str) -> str:
        if isinstance(cell, bool):
            return "yes"
        if cell not in reasons:
            reasons.append(cell)
        return f"no ({reasons.index(cell) + 1})"

    marks = {name: {column: mark(cell) for column, cell in row.items()} for name, row in of_device.items()}
    absent = {
        arrangement.name: next(iter(marks.values()))[arrangement.name]
        for arrangement in ARRANGEMENTS
        if not any(row[arrangement.name] is True for row in of_device.values())
    }
    columns = {
        group: [one.name for one in arrangements if one.name not in absent]
        for group, arrangements in ARRANGEMENT_GROUPS.items()
    }
    return DeviceTable(columns, marks, absent, reasons)


def as_text() -> str:
    """Return all tables as text."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=StringIO(), width=_WIDTH, highlight=False)
    for device in DEVICES:
        found = table_of(device)
        for title, columns in found.columns.items():
            table = Table(f"on {device}, {title}", *columns, box=None, pad_edge=False)
            for group, features in FEATURES.items():
                table.add_row(f"[bold]{group}[/bold]")
                for feature in features:
                    table.add_row(f"  {feature.name}", *(found.marks[feature.name][column] for column in columns))
            console.print(table)
            console.print()
        for name, number in found.absent.items():
            console.print(f"not at all: {name}, {number}", markup=False)
        for index, reason in enumerate(found.reasons, start=1):
            console.print(f"{index:>3}  {reason}", markup=False)
        console.print()
    width = max(map(len, MEANINGS))
    for name, meaning in MEANINGS.items():
        console.print(f"{name:<{width}} {meaning}", markup=False)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _cell(feature: Feature, arrangement: Arrangement, device: str) -> bool | str:
    refusal = refusal_of(feature, arrangement, device)
    return True if refusal is None else f"{refusal.why[0].upper()}{refusal.why[1:]}. {refusal.instead}"
