"""Replay of mutated recordings: `python -m support.mutated_recordings RECORDING NUM_EXAMPLES`.

A process of its own, since a mutation that is not noticed may end it. Prints how the examples ended.
"""

from __future__ import annotations

import copy
import struct
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from penstock.engine.replay import replay
from penstock.errors import PenstockError

_HEAD = struct.Struct("<II")
_NUMBERS = (-1, 0, 1, 2, 10**6, 2**31, -(2**31), 2**62)


def read_entries(path: Path) -> tuple[bytes, list[Any]]:
    """First line of a recording, and its entries as plain data."""
    line, _, data = path.read_bytes().partition(b"\n")
    entries, position = [], 0
    while position < len(data):
        length, _ = _HEAD.unpack_from(data, position)
        position += _HEAD.size + length
        entries.append(msgspec.msgpack.decode(data[position - length : position]))
    return line, entries


def write_entries(path: Path, line: bytes, entries: list[Any]) -> None:
    """Write a recording of plain data, with valid checksums."""
    parts = [msgspec.msgpack.encode(entry) for entry in entries]
    path.write_bytes(line + b"\n" + b"".join(_HEAD.pack(len(one), zlib.crc32(one)) + one for one in parts))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Containers and keys of all integers and lists in plain data, but for options of the engine."""
    keys = value.keys() - {"options"} if isinstance(value, dict) else range(len(value))
    for key in sorted(keys, key=str):
        part = value[key]
        if isinstance(part, (dict, list)):
            yield from places(part)
        if isinstance(part, (int, list)) and not isinstance(part, bool):
            yield value, key


def _mutate(entries: list[Any], pick: Callable[[int], int]) -> None:
    kind = pick(8)
    if kind == 0:
        entries.pop(1 + pick(len(entries) - 1))
    elif kind == 1:
        entries.insert(1 + pick(len(entries)), copy.deepcopy(entries[pick(len(entries))]))
    else:
        found = list(places(entries[pick(len(entries))]))
        if not found:
            return
        container, key = found[pick(len(found))]
        old = container[key]
        if isinstance(old, list):
            container[key] = [[], old * 2, old[1:], [*old, 10**6]][pick(4)]
        else:
            container[key] = (*_NUMBERS, old + 1, old - 1)[pick(len(_NUMBERS) + 2)]


def main(path: Path, num_examples: int) -> None:
    """Replay mutations of a recording."""
    line, original = read_entries(path)
    ends: Counter[str] = Counter()

    @seed(1)
    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        entries = copy.deepcopy(original)
        for _ in range(data.draw(st.integers(1, 2))):
            _mutate(entries, lambda size: data.draw(st.integers(0, max(0, size - 1))))
        mutated = Path(folder) / "mutated.rec"
        write_entries(mutated, line, entries)
        try:
            replay(mutated)
            ends["replayed"] += 1
        except PenstockError as error:
            ends[type(error).__name__] += 1

    with tempfile.TemporaryDirectory() as folder:
        run()
    print(dict(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
