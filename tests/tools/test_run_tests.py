"""Small projects whose tests pass, fail always, fail once, or are not there, with and without several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "run_tests.py"
PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    assert False\n"
SKIPS = "import pytest\ndef test_skips():\n    pytest.skip('not here')\n"
# The file that it leaves behind is what the second run finds.
FLAKY = """
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["a b", "c::d[e]"])
def test_flaky(name):
    trace = Path(__file__).with_name(name.replace(":", "_"))
    was_there = trace.exists()
    trace.touch()
    assert was_there
"""
FLAKY_IDS = ["tests/test_it.py::test_flaky[a b]", "tests/test_it.py::test_flaky[c::d[e]]"]
BROKEN_ID = "tests/test_it.py::test_fails"


def run_tool(root: Path, source: str, *arguments: str) -> tuple[int, list[str]]:
    """The exit status, and what is said line by line."""
    (root / "tests").mkdir()
    (root / "tests/test_it.py").write_text(source)
    (root / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    command = [sys.executable, str(TOOL), "tests", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.splitlines()


def listed(lines: list[str], title: str) -> list[str]:
    """The tests under a title."""
    tests = []
    for line in lines[lines.index(title) + 1 :] if title in lines else []:
        if not line.startswith("  "):
            break
        tests.append(line.strip())
    return tests


def test_a_run_without_failures_is_green_and_runs_nothing_again(tmp_path: Path) -> None:
    status, lines = run_tool(tmp_path, PASSES + SKIPS)
    assert status == 0
    assert sum("passed" in line for line in lines) == 1


@pytest.mark.parametrize("arguments", [[], ["-n", "2", "--dist", "loadfile"]], ids=["one process", "two"])
@pytest.mark.one_case_quick
def test_a_flaky_test_is_listed_and_the_run_is_green(tmp_path: Path, arguments: list[str]) -> None:
    status, lines = run_tool(tmp_path, PASSES + FLAKY, *arguments)
    assert status == 0
    assert listed(lines, "Flaky: failed, then passed alone:") == FLAKY_IDS
    assert listed(lines, "Failed twice:") == []


@pytest.mark.parametrize("arguments", [[], ["-n", "2", "--dist", "loadfile"]], ids=["one process", "two"])
@pytest.mark.slow
def test_a_test_that_fails_twice_makes_the_run_red(tmp_path: Path, arguments: list[str]) -> None:
    status, lines = run_tool(tmp_path, PASSES + FLAKY + FAILS, *arguments)
    assert status == 1
    assert listed(lines, "Flaky: failed, then passed alone:") == FLAKY_IDS
    assert listed(lines, "Failed twice:") == [BROKEN_ID]


@pytest.mark.parametrize("source", ["", SKIPS, "import nothing_of_that_name\n"], ids=["none", "skipped", "no import"])
def test_a_run_without_tests_is_red(tmp_path: Path, source: str) -> None:
    status, lines = run_tool(tmp_path, source)
    assert status != 0
    assert not listed(lines, "Flaky: failed, then passed alone:")


@pytest.mark.slow
def test_a_test_that_is_skipped_the_second_time_has_not_passed(tmp_path: Path) -> None:
    source = FLAKY.replace("assert was_there", "pytest.skip('gone') if was_there else pytest.fail('once')")
    status, lines = run_tool(tmp_path, PASSES + source)
    assert status == 1
    assert listed(lines, "Failed twice:") == FLAKY_IDS


@pytest.mark.slow
def test_a_process_that_dies_in_a_test_makes_the_run_red(tmp_path: Path) -> None:
    status, lines = run_tool(tmp_path, PASSES + "def test_dies():\n    import os\n    os._exit(3)\n", "-n", "2")
    assert status == 1
    assert listed(lines, "Failed twice:") == ["tests/test_it.py::test_dies"]


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    many = "import pytest\n@pytest.mark.parametrize('number', range(21))\ndef test_fails(number):\n    assert False\n"
    status, lines = run_tool(tmp_path, PASSES + many)
    assert status == 1
    assert sum("passed" in line for line in lines) == 1
