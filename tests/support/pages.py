"""Code blocks of the documentation's pages, and their execution.

A comment right before a block says what is special about it:

    <!-- file: no_repeat.py -->         it is a file that later blocks of the page use
    <!-- fails: There is no option -->  it must fail, with this in its message
    <!-- not run: needs a GPU -->       it cannot run here, for one of `REASONS`
    <!-- slow -->                       it is run by `make test-slow` only
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import penstock

REPOSITORY = Path(__file__).parents[2]
# What users read, and what is run of it. docs/internals is for builders.
USER_PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
RUN = ("python", "sh")
# Data, and what is printed.
SHOWN = ("text", "json", "toml")
REASONS = (
    "installs packages",
    "needs a GPU",
    "needs the network",
    "needs a Ray cluster",
    "needs a server",
    "asks at a terminal",
    "needs a trainer",
)
# What pages call a model of the reader's own.
MODEL_OF_ONES_OWN = "path/or/hub-id"
_BLOCK = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\S*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LIMIT_S = 600
_COMMAND = """#!/bin/sh
PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{source}" exec "{python}" {arguments} "$@"
"""


class Block(NamedTuple):
    """One block of code. mark: what the comment before it says, and its text."""

    page: str
    line: int
    language: str
    mark: str
    argument: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=str(page.relative_to(REPOSITORY)),
            line=text.count("\n", 0, found.start("code")) + 1,
            language=found["language"],
            mark=(found["mark"] or "").partition(":")[0].strip(),
            argument=(found["mark"] or "").partition(":")[2].strip(),
            code=found["code"],
        )
        for found in _BLOCK.finditer(text)
    ]


def prepare(folder: Path) -> None:
    """Prepare a folder for running pages: the commands that they use, and a model folder."""
    for name, arguments in {"penstock": "-P -m penstock.cli", "python": ""}.items():
        command = folder / "bin" / name
        command.parent.mkdir(exist_ok=True)
        source = Path(penstock.__file__).parents[1]
        command.write_text(_COMMAND.format(source=source, python=sys.executable, arguments=arguments))
        command.chmod(0o755)
    model = folder / MODEL_OF_ONES_OWN
    model.parent.mkdir(parents=True)
    model.symlink_to(Path(penstock.__file__).parent / "assets" / "demo", target_is_directory=True)


def run_block(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block in the current folder. Python blocks of a page share the namespace."""
    if block.mark == "file":
        path = Path(block.argument)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code)
    elif block.mark != "not run" and block.language in RUN:
        failure = _run_python(block, namespace) if block.language == "python" else _run_shell(block)
        if block.mark == "fails":
            assert failure is not None, f"{block} should fail"
            assert block.argument in failure, f"{block}: {failure}"
        else:
            assert failure is None, f"{block}: {failure}"


def _run_python(block: Block, namespace: dict[str, Any]) -> str | None:
    # Empty lines in front, so that a traceback has the lines of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(REPOSITORY / block.page), "exec")
    try:
        exec(code, namespace)
    except Exception as error:
        if block.mark != "fails":
            raise
        return f"{type(error).__name__}: {error}"
    return None


def _run_shell(block: Block) -> str | None:
    environment = {
        **os.environ,
        "PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
    }
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert "Traceback" not in result.stderr, f"{block}: {result.stderr}"
    return None if result.returncode == 0 else f"exit code {result.returncode}: {result.stderr}"
