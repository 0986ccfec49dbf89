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


def arguments_of(command: str, *args: str) -> dict[str, Any]:
    """Arguments that a command gets."""
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    context = found.make_context(command, list(args))
    return dict(context.params)


def test_entries_are_values_of_flags_unless_the_command_line_gives_others(file: Path) -> None:
    found = arguments_of("serve", "--port", "7", "--config", str(file), "--response-role", "tool")
    assert (found["model"], found["port"], found["response_role"]) == ("some/folder", 7, "tool")
    assert (list(found["api_keys"]), found["enable_log_requests"], found["uds"]) == (["one", "two"], True, None)
    assert (found["host"], found["engine_speculative_config"]) == ("0.0.0.0", '{"method": "ngram"}')
    assert found["engine_option"] == ["enable_prefix_caching=false"]


def test_options_that_the_help_does_not_list_have_values_of_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "no-enable-prefix-caching: true\ncudagraph_capture_sizes: [1, 2]\nspeculative_config.method: ngram\n"
        "gpu_memory_utilization: 0.5\nblock-size: 8\noption: a=1\nenable_lora: false\n"
    )
    found = arguments_of("generate", "x", "--option", "b=2", "--enable-lora", f"--config={path}")
    assert found["engine_option"] == [
        *("enable_prefix_caching=false", "cudagraph_capture_sizes=[1, 2]", 'speculative_config={"method": "ngram"}'),
        *("gpu_memory_utilization=0.5", "block_size=8", "b=2", "enable_lora=true"),
    ]


@pytest.mark.parametrize("command", ["serve", "chat", "plan", "eval", "bench", "profile", "generate"])
@pytest.mark.parametrize("args", [["mine"], ["--model", "mine"], ["-m", "mine"]], ids=str)
def test_every_command_takes_the_model_as_its_last_word_or_as_a_flag(command: str, args: list[str]) -> None:
    first = {"bench": ["latency"], "generate": ["a prompt"], "eval": ["--text", "a.txt"]}.get(command, [])
    found = arguments_of(command, *first, *args)
    assert {found["model"], found["model_tag"]} == {None, "mine"}
    assert found.get("prompt", "a prompt") == "a prompt"
    assert found.get("workload", "latency") == "latency"


@pytest.mark.parametrize("command", ["serve", "chat", "plan", "profile"])
def test_a_model_that_is_given_twice_is_refused(command: str) -> None:
    result = CliRunner().invoke(app, [command, "mine", "--model", "yours"])
    assert result.exit_code == 2
    assert "The model is given twice: 'mine' and --model 'yours'" in result.output


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
    found = arguments_of("plan", "mine", "--config", str(path))
    assert (found["model_tag"], found["model"]) == ("mine", None)


def test_a_file_behind_the_end_of_flags_is_a_word() -> None:
    assert arguments_of("generate", "--", "--config")["prompt"] == "--config"


def test_a_date_is_the_text_that_it_is(tmp_path: Path) -> None:
    path = tmp_path / "dates.yaml"
    path.write_text("served-model-name: 2024-01-02\nspeculative_config: {a: 2024-01-02 10:00:00}\n")
    assert read_config_file(path) == {
        "served-model-name": "2024-01-02",
        "speculative_config": {"a": "2024-01-02 10:00:00"},
    }


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
        arguments_of("serve", "--config", str(path))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.search(rf"bad.yaml.*({message})", said, re.DOTALL), said[:500]
    assert len(said) < 2000


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(SystemExit):
        arguments_of("serve", "--config", str(tmp_path / "pipe.yaml"))
    assert "pipe.yaml is a pipe" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of("serve", "--config", str(tmp_path / "none.yaml"))
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


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("max_model_len: -3", "--max-model-len -3 is not valid"),
        ("max-num-seqs: x", "Invalid value for '--max-num-seqs'"),
        ("cp_kv_cache_interleave_size: 0", "--cp-kv-cache-interleave-size 0 is not valid"),
        ("gpu_memory_utilization: 7", "--memory-fraction 7 is not valid"),
        ("num_threads: 0", "--threads 0 is not valid"),
        ("temperature: -1", "--temperature -1"),
        ("enable_lora: maybe", "--enable-lora maybe is not valid"),
        ("enable_expert_parallel: true", "--enable-expert-parallel asks for"),
    ],
)
def test_a_bad_value_of_a_file_is_named_with_its_file(entry: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"{entry}\n")
    result = CliRunner().invoke(app, ["generate", "x", "--config", str(path)])
    assert result.exit_code == 2
    assert f"--config {path}: {message}" in " ".join(result.output.split())
    flag, _, value = entry.partition(": ")
    typed = [f"--{flag}"] if value == "true" else [f"--{flag}={value}"]
    result = CliRunner().invoke(app, ["generate", "x", "--config", str(path), *typed])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "--config" not in result.output
