"""What the import linter cannot see: what is imported at run time, and where the environment is read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "penstock"


def _imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import penstock",
        "import penstock.contract",
        "import penstock.config",
        "import penstock.scheduler.scheduler",
        "import penstock.cli.main",
    ],
)
def test_what_needs_no_torch_imports_none(statement: str) -> None:
    heavy = {"torch", "transformers", "numpy"} if "scheduler" not in statement else {"torch", "transformers"}
    assert not heavy & _imported_by(statement)


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"os\.environ|os\.getenv", path.read_text())
    }
    # The wrapper sets variables for its worker, as its executor tells it to.
    assert readers == {"config/env.py", "worker/wrapper.py"}


def test_no_module_keeps_hidden_state() -> None:
    offenders = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"^\s*global ", path.read_text(), re.MULTILINE)
    ]
    assert offenders == []
