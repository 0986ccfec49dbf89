"""Options of a server that cannot be used are refused before the model is loaded."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import EngineConfig
from penstock.config.queue import QueueLimits
from penstock.engine.dispatcher import start_core
from penstock.errors import ConfigError
from penstock.server.options import ServerOptions
from penstock.server.processes.launcher import Launcher
from penstock.server.processes.network import NetworkOptions
from penstock.server.start_checks import check_start
from support.server_process import ServerProcess
from support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig.create("demo")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_call_parser": "nope"}, "tool_call_parser='nope'"),
        ({"chat_template": "{% if %}"}, "chat_template is no valid Jinja template: .*line 1"),
        ({"chat_template": "/no/such/file.jinja"}, "/no/such/file.jinja"),
        ({"lora_modules": ("a=/no/such/adapter",)}, "enable_lora"),
        ({"response_store_dir": "/proc/no/such/folder"}, "response_store_dir='/proc/no/such/folder'"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(
    config: EngineConfig, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_start(ServerOptions(served_model_name=("demo",), **fields), config)


def test_options_of_media_are_refused_by_name() -> None:
    config = EngineConfig.create("demo", media_io_kwargs={"video": {"num_frames": -5}})
    with pytest.raises(ConfigError, match=r"media_io_kwargs\['video'\]\['num_frames'\]=-5 is not valid"):
        check_start(ServerOptions(served_model_name=("demo",)), config)
    with pytest.raises(ConfigError, match=r"media_io_kwargs\['video'\]\['num_frames'\]=-5 is not valid"):
        start_core(config, lambda: pytest.fail("the model is being loaded"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_routes_without_a_key_are_refused_where_other_machines_connect(config: EngineConfig, host: str) -> None:
    options = ServerOptions(served_model_name=("demo",), rl_routes_without_key=True)
    launcher = Launcher(config, options, NetworkOptions(host=host), QueueLimits(), began=0.0)
    with pytest.raises(ConfigError, match=f"rl_routes_without_key .* host={host} lets others connect"):
        launcher.run()


def test_an_adapter_without_a_folder_is_named(tmp_path: Path) -> None:
    options = ["--enable-lora", "--lora-modules", f"mine={tmp_path}"]
    result = CliRunner().invoke(app, ["serve", "demo", *options])
    assert result.exit_code == 1
    assert f"The adapter 'mine' has no adapter_config.json in {tmp_path}" in result.output.replace("\n", "")


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no.pem"
    path.write_text("no certificate")
    options = NetworkOptions(ssl_certfile=str(path), ssl_keyfile=str(path))
    with pytest.raises(ConfigError, match=r"ssl_certfile='.*no\.pem'.*cannot be used"):
        options.check_certificates()


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl makes the certificate")


def make_certificate(folder: Path, *options: str) -> dict[str, str]:
    """A certificate of localhost, as options of a server. options: of `openssl req`, for the key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=localhost", *options]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


@needs_openssl
def test_an_encrypted_key_needs_its_password(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "-passout", "pass:secret")
    NetworkOptions(**files, ssl_keyfile_password="secret").check_certificates()
    with pytest.raises(ConfigError, match="ssl_keyfile_password") as refused:
        NetworkOptions(**files).check_certificates()
    assert isinstance(refused.value.__cause__, ssl.SSLError)


def test_a_unix_socket_that_another_server_has_is_left_to_it(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    options = NetworkOptions(uds=path)
    with options.listening():
        with pytest.raises(ConfigError, match="cannot be listened on"), options.listening():
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    assert not Path(path).exists()


@pytest.mark.slow
def test_a_server_with_a_wrong_option_ends_and_names_it(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "log", "--chat-template", "{% if %}")
    try:
        assert server.process.wait(PATIENCE_S) == 2
        assert "chat_template is no valid Jinja template" in server.text
        assert "Traceback" not in server.text
    finally:
        server.close()


@needs_openssl
@pytest.mark.slow
def test_a_server_with_a_certificate_speaks_https(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "-nodes")
    flags = [part for name, path in files.items() for part in (f"--{name.replace('_', '-')}", path)]
    server = ServerProcess(tmp_path / "log", *flags)
    try:
        server.wait_until_ready()
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=files["ssl_certfile"])
        with urllib.request.urlopen(f"{server.url}/health", context=context, timeout=PATIENCE_S) as response:
            assert response.status == 200
        assert server.stop() == 0
    finally:
        server.close()
