"""What a CPU allows, measured now: how fast its memory is read, and how fast it multiplies and adds.

A small C program in a process of its own measures both, so that no other thread pool is in its way. Machines drift:
take a ceiling right beside what is compared with it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("ceilings.c")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """read: GB/s from memory, in large pages. multiply_add: GFLOP/s in single precision."""

    read: float
    multiply_add: float


class CeilingMeter:
    """Compiles the program once; each call of `measure` takes about half a second."""

    def __init__(self, threads: int, megabytes: int = 256) -> None:
        self._folder = tempfile.TemporaryDirectory()
        program = Path(self._folder.name) / "ceilings"
        compiler = os.environ.get("CC", "cc")
        options = ["-O3", "-march=native", "-pthread", "-ffp-contract=fast"]
        subprocess.run([compiler, *options, str(_SOURCE), "-o", str(program)], check=True)
        self._command = [str(program), str(threads), str(megabytes)]

    def measure(self) -> Ceiling:
        printed = subprocess.run(self._command, check=True, capture_output=True, text=True).stdout
        read, multiply_add = map(float, printed.split())
        return Ceiling(read, multiply_add)
