"""Flags from a file: read as if typed before the others."""

from __future__ import annotations

from pathlib import Path

import pytest
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
    path, flags, others = read_config_file(["--port", "7", "--config", str(file)])
    assert path == file
    assert flags == [
        *("--port", "9000", "--api-key", "one", "--api-key", "two", "--enable-log-requests"),
        *("--no-enable-prefix-caching", "--speculative-config", '{"method": "ngram"}', "--host", "0.0.0.0"),
        *("--model", "some/folder"),
    ]
    assert others == ["--port", "7"]


@pytest.mark.parametrize("model", [["demo"], ["--model", "demo"], ["--model=demo"], ["-m", "demo"]])
def test_the_model_of_the_command_line_replaces_that_of_the_file(file: Path, model: list[str]) -> None:
    _, flags, others = read_config_file([*model, f"--config={file}"])
    assert others == model
    assert "some/folder" not in flags


def test_without_a_file_nothing_changes() -> None:
    args = ["demo", "--port", "1", "--", "--config", "x"]
    assert read_config_file(args) == (None, [], args)


@pytest.mark.parametrize(
    ("text", "message"), [("[1, 2]", "a mapping of flags"), ("a: [", "not valid YAML"), ("1: 2", "a mapping of flags")]
)
def test_a_file_that_is_no_mapping_is_refused(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        read_config_file(["--config", str(path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


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
