"""Markers that leave a part of a test's cases in the quick suite, and give the slow suite the others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SOURCE = """
import pytest


@pytest.mark.one_case_quick
@pytest.mark.parametrize("second", [3, 4])
@pytest.mark.parametrize("first", [1, 2])
def test_marked(first, second):
    pass


@pytest.mark.each_value_quick
@pytest.mark.parametrize("second", [3, 4, 5])
@pytest.mark.parametrize("first", [1, 2])
def test_each(first, second):
    pass


@pytest.mark.parametrize("first", [1, 2])
def test_unmarked(first):
    pass
"""


EACH_VALUE = ["test_each[1-3]", "test_each[1-4]", "test_each[1-5]", "test_each[2-3]"]


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        ("not slow", [*EACH_VALUE, "test_marked[1-3]", "test_unmarked[1]", "test_unmarked[2]"]),
        ("slow", ["test_each[2-4]", "test_each[2-5]", "test_marked[1-4]", "test_marked[2-3]", "test_marked[2-4]"]),
    ],
)
def test_marked_cases_are_quick_and_the_others_are_slow(tmp_path: Path, suite: str, expected: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(SOURCE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    one_case_quick\n    each_value_quick\n")
    shutil.copy(CONFTEST, tmp_path)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", suite]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout
    assert sorted(line.split("::")[1] for line in found.splitlines() if "::" in line) == expected
