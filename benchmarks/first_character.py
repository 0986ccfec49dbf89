"""Seconds from the start of `penstock generate` to its first character, and what `import penstock` costs.

python -m benchmarks.first_character [--repeats 7] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.machine import machine, save

_GENERATE = [sys.executable, "-m", "penstock.cli", "generate", "ROMEO:", "--max-tokens", "8"]


def first_character(environment: Mapping[str, str] | None = None) -> tuple[float, int]:
    """Seconds, and the lines of the log. environment: of the process, if not this one's.

    Raises RuntimeError with what the process said if it printed nothing.
    """
    begin = time.perf_counter()
    with subprocess.Popen(_GENERATE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        character = process.stdout.read(1)
        elapsed = time.perf_counter() - begin
        if not character:
            raise RuntimeError(f"penstock generate printed nothing: {process.stderr.read().decode()}")
        process.stdout.read()
        return elapsed, len(process.stderr.read().splitlines())


def python_start(statement: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    first_character()
    runs = [first_character() for _ in range(arguments.repeats)]
    imports = [python_start("import penstock") - python_start("pass") for _ in range(arguments.repeats)]
    report = {
        "machine": machine(2),
        "first character, s": statistics.median(seconds for seconds, _ in runs),
        "slowest first character, s": max(seconds for seconds, _ in runs),
        "lines of log": max(lines for _, lines in runs),
        "import penstock over an empty interpreter, s": statistics.median(imports),
    }
    print(json.dumps(report, indent=1))
    if arguments.output is not None:
        save(arguments.output, "first-character", report=report)


if __name__ == "__main__":
    main()
