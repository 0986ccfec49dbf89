"""Runs pytest, then every failed test once more, alone, and tells flaky tests from broken ones.

    python tools/run_tests.py [PYTEST'S ARGUMENTS]

The exit status is 0 if at least one test passed and every test that failed passes when it runs alone: such a test is
listed as flaky. It is pytest's own where pytest could not run the tests, and 1 otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

_PASSED, _FAILED, _NONE_FOUND = 0, 1, 5  # pytest's exit statuses; others mean that it could not run the tests
# More failures than this have a common cause, and are not run again.
_MOST_FLAKY = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: pytest's exit status. failed: ids of tests, in order."""

    status: int
    num_passed: int
    failed: list[str]

    @property
    def is_green(self) -> bool:
        return self.status == _PASSED and self.num_passed > 0


def run_pytest(arguments: Sequence[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        results, cache = Path(folder) / "results.xml", Path(folder) / "cache"
        options = [f"--junitxml={results}", "-o", f"cache_dir={cache}"]
        status = subprocess.run([sys.executable, "-m", "pytest", *arguments, *options]).returncode
        last_failed = cache / "v/cache/lastfailed"
        failed = sorted(json.loads(last_failed.read_text())) if last_failed.exists() else []
        return Outcome(status, _num_passed(results), failed)


def _num_passed(results: Path) -> int:
    """Test cases in a file of JUnit's format without failure, error or skip."""
    if not results.exists():
        return 0
    cases = ElementTree.parse(results).iter("testcase")
    return sum(not any(child.tag in ("failure", "error", "skipped") for child in case) for case in cases)


def main(arguments: Sequence[str]) -> int:
    first = run_pytest(arguments)
    if first.status == _NONE_FOUND or (first.status == _PASSED and not first.num_passed):
        print("Red: no test ran.")
        return 1
    if first.status != _FAILED or not first.failed:
        return first.status
    if len(first.failed) > _MOST_FLAKY:
        print(f"Red: {len(first.failed)} tests failed. Up to {_MOST_FLAKY} run once more.")
        return 1
    print(f"{len(first.failed)} failed. Each runs once more, alone.", flush=True)
    broken = [test for test in first.failed if not run_pytest([test]).is_green]
    _list("Failed twice", broken)
    _list("Flaky: failed, then passed alone", [test for test in first.failed if test not in broken])
    return 1 if broken else 0


def _list(title: str, tests: Sequence[str]) -> None:
    if tests:
        print(f"{title}:", *tests, sep="\n  ", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
