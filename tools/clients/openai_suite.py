"""Runs the test suite of OpenAI's Python client, from its source distribution, against `penstock serve`.

    python -m tools.clients.openai_suite [PYTEST'S ARGUMENTS]

openai_suite.toml has the tests that are deselected, and the parameters that Penstock refuses. The exit status is 1 if a
test fails, none passes, or a listed parameter is never refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.server_process import ServerProcess, serve_command
from tools.clients.environment import client_python, source_of

_HERE = Path(__file__).parent
_LISTS = _HERE / "openai_suite.toml"
_ENGINE = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB", "--max-model-len", "256")
# What the suite's conftest.py imports, beside the client.
_TEST_PACKAGES = ("pytest==9.2.0", "pytest-asyncio==1.5.0", "rich==15.0.0")

Rows = Sequence[tuple[str, str, str]]


def run_suite(lists: Mapping[str, object], arguments: Sequence[str]) -> Rows:
    """Test, outcome and reason of every test."""
    package = f"openai=={lists['version']}"
    python = client_python("openai", (f"openai[aiohttp]=={lists['version']}", *_TEST_PACKAGES))
    source = source_of(python, package)
    names = [str(name) for name in lists["models"]]  # type: ignore[attr-defined]
    files = [str(name) for name in lists["files"]]  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        options = [flag for name in names for flag in ("--served-model-name", name)]
        with ServerProcess(serve_command("demo", *_ENGINE, *options), Path(folder) / "server.log") as server:
            variables = {
                "TEST_API_BASE_URL": f"{server.url}/v1",
                "OPENAI_SUITE": str(_LISTS),
                "OPENAI_SUITE_RESULTS": str(results),
                "PYTHONPATH": str(_HERE),
            }
            command = [python, "-m", "pytest", "-q", "-o", "addopts=--tb=short", "-p", "openai_plugin", *files]
            subprocess.run([*command, *arguments], cwd=source, env=os.environ | variables)
        return [tuple(row) for row in json.loads(results.read_text())] if results.exists() else []


def report(rows: Rows, refused: Mapping[str, str]) -> list[str]:
    """Lines of a table: outcomes with their counts, and the tests of each reason."""
    lines = []
    for outcome in ("passed", "refused", "deselected", "skipped", "failed"):
        reasons = Counter(reason for _, kind, reason in rows if kind == outcome)
        lines.append(f"{outcome:<12}{sum(reasons.values()):>5}")
        if outcome == "failed":
            lines += [f"{'':<19}{name}" for name, kind, _ in rows if kind == outcome]
        else:
            lines += [f"{'':<12}{count:>5}  {reason}" for reason, count in sorted(reasons.items()) if reason]
    return [*lines, "", "Refused parameters:", *(f"  {name}: {why}" for name, why in refused.items())]


def main(arguments: Sequence[str]) -> int:
    lists = tomllib.loads(_LISTS.read_text())
    rows = run_suite(lists, arguments)
    print("\n".join(report(rows, lists["refused"])))
    outcomes = {outcome for _, outcome, _ in rows}
    met = {name for _, outcome, names in rows if outcome == "refused" for name in names.split(", ")}
    unmet = sorted(lists["refused"].keys() - met)
    if unmet and not arguments:
        print(f"Never refused, so they should leave the list: {', '.join(unmet)}.")
    return int("failed" in outcomes or "passed" not in outcomes or bool(unmet and not arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
