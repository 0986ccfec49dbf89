"""`penstock env --capabilities`: the table that refusals are made from, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from typing import TypeAlias

from penstock.worker.capabilities import ARRANGEMENTS, DEVICES, FEATURES, Arrangement, Feature, refusal_of
from penstock.worker.capabilities.arrangements import MEANINGS

# By device, feature and arrangement: True, or why not and what to do instead.
Cells: TypeAlias = dict[str, dict[str, dict[str, bool | str]]]
_WIDTH = 150


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """columns: arrangements that the device has. rows: by group, each feature's name with "yes", or the number of a
    reason, by column. absent: arrangements that it does not have, with such a number. reasons: the first is number 1.
    """

    columns: list[str]
    rows: dict[str, list[tuple[str, list[str]]]]
    absent: dict[str, str]
    reasons: list[str]


def cells() -> Cells:
    """All of it, as data."""

    def of_feature(feature: Feature, device: str) -> dict[str, bool | str]:
        return {arrangement.name: _cell(feature, arrangement, device) for arrangement in ARRANGEMENTS}

    features = [feature for group in FEATURES.values() for feature in group]
    return {device: {feature.name: of_feature(feature, device) for feature in features} for device in DEVICES}


def table_of(device: str) -> DeviceTable:
    """What a person reads of a device."""
    of_device = cells()[device]
    reasons: list[str] = []

    def mark(cell: bool | str) -> str:
        if isinstance(cell, bool):
            return "yes"
        if cell not in reasons:
            reasons.append(cell)
        return f"no ({reasons.index(cell) + 1})"

    columns: list[str] = []
    absent: dict[str, str] = {}
    for name in (arrangement.name for arrangement in ARRANGEMENTS):
        found = [of_feature[name] for of_feature in of_device.values()]
        if True in found:
            columns.append(name)
        else:
            absent[name] = mark(found[0])
    rows = {
        group: [(feature.name, [mark(of_device[feature.name][column]) for column in columns]) for feature in features]
        for group, features in FEATURES.items()
    }
    return DeviceTable(columns, rows, absent, reasons)


def as_text() -> str:
    """The tables for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=StringIO(), width=_WIDTH, highlight=False)
    for device in DEVICES:
        found = table_of(device)
        table = Table(f"on {device}", *found.columns, box=None, pad_edge=False)
        for group, rows in found.rows.items():
            table.add_row(f"[bold]{group}[/bold]")
            for name, row in rows:
                table.add_row(f"  {name}", *row)
        for name, number in found.absent.items():
            table.add_row(f"all with {name}", number)
        console.print(table)
        for index, reason in enumerate(found.reasons, start=1):
            console.print(f"{index:>3}  {reason}", markup=False)
        console.print()
    for name, meaning in MEANINGS.items():
        console.print(f"{name:<4} {meaning}", markup=False)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _cell(feature: Feature, arrangement: Arrangement, device: str) -> bool | str:
    refusal = refusal_of(feature, arrangement, device)
    return True if refusal is None else f"{refusal.why[0].upper()}{refusal.why[1:]}. {refusal.instead}"
