"""Files and JSON on a command line: what cannot be read is an error that names it, at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.failures import read_file, read_text_file
from penstock.cli.sections import parse_json, parse_value
from penstock.engine.replay import replay
from penstock.errors import ConfigError, InvalidRecording
from penstock.features.lora.modules import read_lora_modules

DEEP = "[" * 20_000 + "]" * 20_000


def test_a_pipe_without_a_writer_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=f"--input {pipe} is a pipe or socket"):
        read_file("--input", pipe)
    with pytest.raises(InvalidRecording, match=f"{pipe} is a FIFO"):
        replay(pipe)


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, "é".encode())
    os.close(writing)
    assert read_text_file("--grammar", Path(f"/dev/fd/{reading}")) == "é"
    os.close(reading)


def test_a_file_that_is_no_text_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"--grammar .*bytes is not UTF-8"):
        read_text_file("--grammar", tmp_path / "bytes")


def test_json_that_is_nested_too_deep_is_not_valid() -> None:
    with pytest.raises(ConfigError, match=r"--x '\[\[.*nested too deep") as raised:
        parse_json("--x", DEEP)
    assert len(str(raised.value)) < 1000
    assert parse_value(DEEP) == DEEP
    with pytest.raises(ConfigError, match="lora_modules has ") as raised:
        read_lora_modules(['{"name": ' + DEEP + "}"])
    assert len(str(raised.value)) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--input", "--json-schema", "--grammar"])
def test_generate_does_not_wait_for_a_pipe(flag: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-m", "penstock.cli", "generate", flag, str(tmp_path / "pipe")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert f"{flag} {tmp_path / 'pipe'} is a pipe or socket" in done.stderr
