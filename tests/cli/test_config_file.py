"""Flags from a file: read as if typed before the others."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.config_file import read_config_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(
        "model: some/folder\nport: 9000\napi_key: [one, two]\nenable-log-requests: true\n"
        'enable_prefix_caching: false\nspeculative_config: {method: ngram}\nuds:\nhost: "0.0.0.0"\n'
    )
    return path


def test_entries_are_flags_before_those_of_the_command_line(file: Path) -> None:
    path, flags, model, others = read_config_file(["--port", "7", "--config", str(file)])
    assert (path, model) == (file, "some/folder")
    assert flags == [
        *("--port", "9000", "--api-key", "one", "--api-key", "two", "--enable-log-requests"),
        *("--no-enable-prefix-caching", "--speculative-config", '{"method": "ngram"}', "--host", "0.0.0.0"),
    ]
    assert others == ["--port", "7"]


def arguments_of(command: str, *args: str) -> dict[str, Any]:
    """Arguments that a command gets."""
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    context = found.make_context(command, list(args))
    return dict(context.params)


@pytest.mark.parametrize(
    "args",
    [
        ["mine"],
        ["--model", "mine"],
        ["--model=mine"],
        ["-m", "mine"],
        ["-mmine"],
        ["--max-num-seqs", "4", "mine"],
        ["--enable-lora", "--gpu-memory-utilization", "0.5", "mine"],
        ["--port", "1", "--", "mine"],
    ],
    ids=str,
)
def test_the_model_of_the_command_line_replaces_that_of_the_file(file: Path, args: list[str]) -> None:
    for both in ([*args[:-1], f"--config={file}", args[-1]], ["--config", str(file), *args]):
        if both[-2].startswith("--config") and args[-2:-1] in (["--"], ["--model"], ["-m"]):
            continue  # it would be the value of another flag
        found = arguments_of("serve", *both)
        assert {found["model"], found["model_tag"]} == {None, "mine"}


@pytest.mark.parametrize(
    ("command", "args"),
    [
        ("serve", []),
        ("serve", ["--max-num-seqs", "4"]),
        ("generate", ["a prompt"]),
        ("generate", ["--max-num-seqs", "4", "a prompt"]),
        ("plan", []),
        ("plan", ["--max-num-seqs", "4"]),
        ("embed", []),
    ],
    ids=str,
)
def test_every_command_takes_the_model_of_the_file(command: str, args: list[str], tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("model: some/folder\nmax_model_len: 64\n")
    found = arguments_of(command, *args, "--config", str(path))
    assert found["model"] == "some/folder"
    assert found.get("model_tag") is None
    assert found.get("prompt", "a prompt") == "a prompt"


def test_a_model_in_front_of_plan_replaces_that_of_the_file(file: Path) -> None:
    path = file.with_name("plan.yaml")
    path.write_text("model: some/folder\n")
    assert arguments_of("plan", "mine", "--config", str(path))["model"] == "mine"


def test_without_a_file_nothing_changes() -> None:
    args = ["demo", "--port", "1", "--", "--config", "x"]
    assert read_config_file(args) == (None, [], None, args)


def test_a_date_is_the_text_that_it_is(tmp_path: Path) -> None:
    path = tmp_path / "dates.yaml"
    path.write_text("served-model-name: 2024-01-02\nspeculative_config: {a: 2024-01-02 10:00:00}\n")
    assert read_config_file(["--config", str(path)]).flags == [
        *("--served-model-name", "2024-01-02", "--speculative-config", '{"a": "2024-01-02 10:00:00"}')
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "a mapping of flags"),
        ("a: [", "not valid YAML"),
        ("1: 2", "a mapping of flags"),
        ("port: !!set {a, b}", "has port: .*a set"),
        ("port: !!binary aGk=", "has port: .*a bytes"),
        ("port: !!timestamp 2024-01-01", "has port: .*a date"),
        ("port: {[1]: 2}", "has port|not valid YAML"),
        ("port: {!!timestamp 2024-01-01 : 2}", "has port: .*keys that are texts"),
        ("port: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("port: " + "[" * 100 + "]" * 100, "has port, which is too large"),
        ("port: " + "[" * 20_000 + "]" * 20_000, "too large|too deep|nesting depth"),
        ("port: &a [*a]", "too large"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{n}: &{n} [{','.join([f'*{o}'] * 10)}]\n" for o, n in pairwise("abcdefgh")),
            "too large",
        ),
        (b"port: \xff", "not valid YAML.*utf-8"),
        ("model: [a, b]", "has model: .*Allowed: a text"),
        ("model: 7", "has model: 7.*Allowed: a text"),
        ("config: other.yaml", "'config', which is no option of a file"),
        ('"": 1', "'', which is no option of a file"),
        ('"--": 1', "'--', which is no option of a file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_that_is_no_mapping_of_flags_is_refused(
    tmp_path: Path, text: str | bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as ended:
        read_config_file(["--config", str(path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.search(rf"bad.yaml.*({message})", said, re.DOTALL), said[:500]
    assert len(said) < 2000


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(SystemExit):
        read_config_file(["--config", str(tmp_path / "pipe.yaml")])
    assert "pipe.yaml is a pipe" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_config_file(["--config", str(tmp_path / "none.yaml")])
    assert "none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_an_unknown_entry_is_named_with_its_file(command: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("max-model-len: 100\nmax_modl_len: 200\n")
    result = CliRunner().invoke(app, [command, "--config", str(path)])
    assert result.exit_code == 2
    output = result.output.replace("\n", "")
    assert f"--config {path}: No such option: --max-modl-len." in output
    assert "--max-model-len" in output
    typed = CliRunner().invoke(app, [command, "--max-modl-len", "200"])
    assert "--config" not in typed.output
