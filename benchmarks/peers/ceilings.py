"""What the machine can do at most, measured beside each engine: see `ceilings.c`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.environments import repository

_SOURCE = repository() / "benchmarks" / "peers" / "ceilings.c"


class Ceilings:
    """Memory reads and float32 arithmetic; measures nothing where there is no C compiler."""

    def __init__(self, work_dir: Path, threads: int) -> None:
        self._command = [str(work_dir / "bin" / "ceilings"), str(threads)]
        compiler = shutil.which("cc") or shutil.which("gcc")
        self.is_available = compiler is not None
        if compiler is not None:
            (work_dir / "bin").mkdir(parents=True, exist_ok=True)
            flags = ["-O3", "-march=native", "-ffp-contract=fast", "-pthread"]
            subprocess.run([compiler, *flags, str(_SOURCE), "-o", self._command[0]], check=True)

    def measure(self) -> dict[str, float] | None:
        """`memory_gb_s` and `gflop_s`, medians of a quarter of a second each, and the `_best` of each."""
        if not self.is_available:
            return None
        result: dict[str, float] = json.loads(subprocess.check_output(self._command))
        return result
