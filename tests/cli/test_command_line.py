"""Output of the command line without an engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli.app import app


def run(*arguments: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_the_version_is_shown() -> None:
    assert run("--version").stdout == f"penstock {penstock.__version__}\n"


def test_the_package_runs_as_the_command() -> None:
    for arguments in (["--version"], ["--help"], ["generate", "--help"]):
        command = [sys.executable, "-m", "penstock", *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "100"}
        )
        assert result.stdout == run(*arguments).stdout != ""
        assert result.returncode == 0


def test_help_lists_the_commands() -> None:
    out = run("--help").stdout
    assert all(command in out for command in ("generate", "chat", "env"))
    assert "--version" in out


@pytest.mark.parametrize(("columns", "num_lines"), [(100, 55), (80, 68)])
def test_help_of_generate_fits_a_screen(columns: int, num_lines: int) -> None:
    out = run("generate", "--help", columns=columns).stdout
    assert len(out.splitlines()) <= num_lines
    assert max(map(len, out.splitlines())) <= columns


@pytest.mark.parametrize("command", ["generate", "chat", "plan", "bench"])
def test_help_points_to_the_page_of_all_options(command: str) -> None:
    assert "docs/options.md" in run(command, "--help").stdout


@pytest.mark.parametrize("command", ["chat", "env"])
def test_help_of_the_other_commands_fits_a_screen(command: str) -> None:
    out = run(command, "--help").stdout
    assert len(out.splitlines()) <= 48
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("option", "default"),
    [
        ("--max-tokens", "128"),
        ("--temperature", "1.0"),
        ("--model", "demo"),
        ("--device", "auto"),
        ("--max-num-seqs", "256"),
        ("--max-num-batched-tokens", "2048"),
    ],
)
def test_help_shows_defaults(option: str, default: str) -> None:
    (line,) = [line for line in run("generate", "--help").stdout.splitlines() if f"{option} " in line]
    assert re.search(rf"\[default: {re.escape(default)}[],]", line)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["generate", "--help"], ["--version"], ["generate", "--bad"], ["chat", "--help"], ["env", "--help"]],
)
def test_nothing_heavy_is_imported_before_there_is_work(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom penstock.cli.main import main\n"
        f"sys.argv = ['penstock', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch', 'transformers', 'tokenizers', 'numpy', 'msgspec', 'tqdm', 'rich')\n"
        "sys.exit(repr([name for name in heavy if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stderr.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "some/model"], "There is no command run. Type `penstock chat some/model` for a conversation"),
        (["pull", "smollm2"], "type `penstock chat smollm2` or `penstock serve smollm2`, with --yes"),
        (["list"], "Type `penstock plan MODEL` to see what one needs"),
    ],
)
def test_commands_of_other_programs_say_what_to_type(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_unknown_command_is_refused() -> None:
    result = run("generat")
    assert result.returncode == 2
    assert "generat" in result.stderr
    assert "Traceback" not in result.stderr
