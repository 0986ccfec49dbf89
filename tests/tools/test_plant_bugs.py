"""A project of two functions and one test: the tool tells which bugs the test notices."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "plant_bugs.py"
SOURCE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TEST = "from numbers_of_mine import double, half\n\n\ndef test_it():\n    assert (double(2), half(0)) == (4, 0)\n"
CAUGHT = {"old": "2 * x", "new": "3 * x"}
LIVING = {"old": "x / 2", "new": "x / 3"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in {"src/numbers_of_mine.py": SOURCE, "tests/test_it.py": TEST}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    return tmp_path


def plant(root: Path, bugs: dict[str, dict[str, Any]], *options: str) -> tuple[int, list[str]]:
    """The exit status, and what is said line by line."""
    entries = []
    for name, fields in bugs.items():
        entry = {"name": name, "file": "src/numbers_of_mine.py", "tests": ["tests/test_it.py"], **fields}
        # A TOML value of these kinds is written as in JSON.
        entries += ["[[bugs]]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]
    (root / "bugs.toml").write_text("\n".join(entries))
    command = [sys.executable, str(TOOL), "--root", str(root), "--bugs", str(root / "bugs.toml"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_a_bug_that_no_test_notices_lives(root: Path) -> None:
    status, lines = plant(root, {"doubles": CAUGHT, "halves": LIVING, "unreadable": {"old": "2 * x", "new": "2 *"}})
    assert status == 1
    assert lines == [
        "caught: doubles (src/numbers_of_mine.py)",
        "LIVES: halves (src/numbers_of_mine.py)",
        "NOT TRIED, since pytest ended with status 2: unreadable (src/numbers_of_mine.py)",
        "1 of 3 caught",
    ]
    assert (root / "src/numbers_of_mine.py").read_text() == SOURCE


@pytest.mark.slow
def test_all_is_well_when_each_is_caught(root: Path) -> None:
    assert plant(root, {"doubles": CAUGHT, "halves": LIVING}, "--only", "doubles", "--jobs", "1") == (
        0,
        ["caught: doubles (src/numbers_of_mine.py)", "1 of 1 caught"],
    )


def test_a_piece_that_is_not_there_once_is_an_error(root: Path) -> None:
    status, lines = plant(root, {"gone": {"old": "4 * x", "new": ""}, "twice": {"old": "return", "new": ""}})
    assert status == 1
    assert lines == [
        "found 0 times instead of once: gone (src/numbers_of_mine.py)",
        "found 2 times instead of once: twice (src/numbers_of_mine.py)",
    ]


@pytest.mark.slow
def test_tests_that_fail_without_a_bug_show_nothing(root: Path) -> None:
    (root / "tests/test_it.py").write_text(TEST.replace("(4, 0)", "(5, 0)"))
    status, lines = plant(root, {"doubles": CAUGHT})
    assert (status, lines[-1]) == (1, "The tests fail without any bug.")


def test_the_listed_bugs_can_be_planted() -> None:
    project = TOOL.parents[1]
    bugs = tomllib.loads(TOOL.with_name("planted_bugs.toml").read_text())["bugs"]
    lost = [bug["name"] for bug in bugs if (project / bug["file"]).read_text().count(bug["old"]) != 1]
    assert not lost, "the text of their files has changed: mend or remove their entries"
    tests = {project / test.partition("::")[0] for bug in bugs for test in bug["tests"]}
    assert [test for test in tests if not test.exists()] == []
