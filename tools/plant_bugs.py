"""Mutation testing: plants bugs, one at a time, and reports which of them no test detects.

    python tools/plant_bugs.py [--only TEXT] [--jobs N]

`planted_bugs.toml` lists them: each is a piece of a source file, what to put in its place, and the tests that must fail
with it. All happens in copies of the tree; the tree itself is left alone. The exit status is 1 if a bug lives, if a
piece is not in its file exactly once, or if the tests fail without any bug.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from queue import SimpleQueue

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
_BUILD_OUTPUTS = shutil.ignore_patterns("build", "dist")  # of the root
_TESTS_FAILED = 1  # pytest's exit status; others mean that it could not run them
_LONGEST_RUN_S = 120.0


@dataclass(frozen=True, slots=True)
class Bug:
    """old: a piece of `file` that is in it once. new: what to put there. tests: files or ids for pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def read_bugs(path: Path) -> list[Bug]:
    """The bugs of a list. Raises ValueError for one that is described with other fields than those of `Bug`."""
    entries = tomllib.loads(path.read_text())["bugs"]
    expected = {field.name for field in fields(Bug)}
    for entry in entries:
        if set(entry) != expected:
            raise ValueError(f"{entry.get('name', entry)!r} has the fields {sorted(entry)}, not {sorted(expected)}")
    return [Bug(**entry) for entry in entries]


class Tree:
    """A copy of the project, in which bugs can be planted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def planted(self, bug: Bug) -> Iterator[None]:
        path = self._folder / bug.file
        healthy = path.read_text()
        path.write_text(healthy.replace(bug.old, bug.new))
        try:
            yield
        finally:
            path.write_text(healthy)

    def run_clean(self, tests: Sequence[str], num_jobs: int) -> subprocess.CompletedProcess[str]:
        """Run tests without any bug; one that fails runs once more alone, since some depend on the machine's load.

        Later runs use the bytecode that it writes.
        """
        runner = Path(__file__).with_name("run_tests.py")
        return self._run([str(runner), "-q", "-n", str(num_jobs), "--dist", "loadfile", *tests], {}, None)

    def run(self, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run tests up to the first failure. Raises TimeoutExpired when they take too long.

        Writes no bytecode, since a file that changes twice within a second may be taken for the same.
        """
        command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        return self._run(command, {"PYTHONDONTWRITEBYTECODE": "1"}, _LONGEST_RUN_S)

    def _run(
        self, command: Sequence[str], variables: dict[str, str], timeout_s: float | None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": str(self._folder / "src")} | variables,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


def times_found(bug: Bug, root: Path) -> int:
    """Number of occurrences of the piece in its file; 0 if there is no such file."""
    path = root / bug.file
    return path.read_text().count(bug.old) if path.is_file() else 0


def outcome(bug: Bug, trees: SimpleQueue[Tree]) -> str:
    """Outcome of the tests with a bug: "caught" if they fail."""
    tree = trees.get()
    try:
        with tree.planted(bug):
            status = tree.run(bug.tests).returncode
    except subprocess.TimeoutExpired:
        status = _TESTS_FAILED  # tests that hang are noticed
    finally:
        trees.put(tree)
    if status == _TESTS_FAILED:
        return "caught"
    return "LIVES" if status == 0 else f"NOT TRIED, since pytest ended with status {status}"


def plant(bugs: Sequence[Bug], root: Path, folder: Path, num_jobs: int) -> bool:
    """Plant all bugs in copies under `folder`, and report; whether each was caught."""

    def left_out(parent: str, names: list[str]) -> set[str]:
        return _LEFT_OUT(parent, names) | (_BUILD_OUTPUTS(parent, names) if Path(parent) == root else set())

    first = folder / "0"
    shutil.copytree(root, first, ignore=left_out)
    clean = Tree(first).run_clean(sorted({test for bug in bugs for test in bug.tests}), num_jobs)
    if clean.returncode != 0:
        print(clean.stdout[-4000:], clean.stderr[-2000:], "The tests fail without any bug.", sep="\n")
        return False
    trees: SimpleQueue[Tree] = SimpleQueue()
    trees.put(Tree(first))
    for number in range(1, num_jobs):
        trees.put(Tree(Path(shutil.copytree(first, folder / str(number)))))
    with ThreadPoolExecutor(num_jobs) as threads:
        outcomes = []
        for bug, what in zip(bugs, threads.map(lambda bug: outcome(bug, trees), bugs), strict=True):
            print(f"{what}: {bug.name} ({bug.file})", flush=True)
            outcomes.append(what)
    num_caught = outcomes.count("caught")
    print(f"{num_caught} of {len(bugs)} caught")
    return num_caught == len(bugs)


def main() -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Plant bugs and see whether the tests notice.")
    parser.add_argument("--root", type=Path, default=here.parent, help="the project, with src and tests")
    parser.add_argument("--bugs", type=Path, default=here / "planted_bugs.toml", help="the list of bugs")
    parser.add_argument("--only", default="", help="only bugs whose name or file has this text")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at the same time")
    options = parser.parse_args()
    bugs = [bug for bug in read_bugs(options.bugs) if options.only in bug.name or options.only in bug.file]
    misplaced = [bug for bug in bugs if times_found(bug, options.root) != 1]
    for bug in misplaced:
        print(f"found {times_found(bug, options.root)} times instead of once: {bug.name} ({bug.file})")
    placed = [bug for bug in bugs if bug not in misplaced]
    if not placed:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        are_all_caught = plant(placed, options.root, Path(folder), options.jobs)
    return 0 if are_all_caught and not misplaced else 1


if __name__ == "__main__":
    sys.exit(main())
