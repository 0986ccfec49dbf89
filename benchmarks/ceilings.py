"""Ceilings of this CPU: memory bandwidth, and multiply-adds in float32 and of bfloat16 pairs, measured now.

A small C program in a process of its own measures both (`ceilings.c`), so that no other thread pool is in its way.
Machines drift: take a ceiling right before and after the figures that it is compared with.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("ceilings.c")


class Ceilings:
    """Measurements by a C program, compiled once into a folder; none without a C compiler."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._command = [str(folder / "ceilings"), str(threads)]
        compiler = shutil.which("cc") or shutil.which("gcc")
        self.is_available = compiler is not None
        if compiler is not None:
            folder.mkdir(parents=True, exist_ok=True)
            flags = ["-O3", "-march=native", "-ffp-contract=fast", "-pthread"]
            subprocess.run([compiler, *flags, str(_SOURCE), "-o", self._command[0]], check=True)

    def measure(self) -> dict[str, float] | None:
        """`memory_gb_s` and `gflop_s`, medians of a quarter of a second each, and the `_best` of each.

        `bfloat16_gflop_s` too on a processor with AVX512-BF16, and `tile_bfloat16_gflop_s` and `tile_int8_gop_s` on one
        with AMX, if the operating system permits it.
        """
        if not self.is_available:
            return None
        result: dict[str, float] = json.loads(subprocess.check_output(self._command))
        return result
