"""What the import linter cannot see: what is imported at run time, and where the environment is read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"


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
    assert readers == {"system/env.py"}


def _loading_calls() -> Iterator[tuple[str, ast.Call]]:
    """Calls that read a checkpoint with Transformers (`from_pretrained`, and `from_config` of an Auto class)."""
    for folder in (SOURCE, ROOT / "tools", ROOT / "benchmarks"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                receiver = ast.unparse(node.func.value).rpartition(".")[2]
                if node.func.attr == "from_pretrained" or (
                    node.func.attr == "from_config" and receiver.startswith("Auto")
                ):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_the_code_of_a_checkpoint_is_refused_at_every_call_that_loads_one() -> None:
    calls = dict(_loading_calls())
    assert any(place.startswith("src/") for place in calls)
    assert not [
        place
        for place, call in calls.items()
        if not any(
            given.arg == "trust_remote_code" and isinstance(given.value, ast.Constant) and given.value.value is False
            for given in call.keywords
        )
    ]
