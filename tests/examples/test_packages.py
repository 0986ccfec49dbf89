"""The image, the Compose file and the systemd unit, by their parts, and built or run where that is possible."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from penstock.cli.app import app
from penstock.server.http.guards import PUBLIC_PATHS
from support.checkpoints import tiny_model
from support.gguf_files import write_gguf
from support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
SERVING = ROOT / "examples" / "serving"
# Of /etc/passwd's nobody, where tests run as root.
NOBODY = 65534
PROGRAM, STATE, CREDENTIALS = "/opt/penstock/bin/penstock", "/var/lib/penstock", "${CREDENTIALS_DIRECTORY}"


def test_what_the_image_copies_is_there() -> None:
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (SERVING / "Dockerfile").read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert {"src", "setup.py"} <= set(names)
    assert [name for name in names if not (ROOT / name).exists()] == []


def unit() -> configparser.SectionProxy:
    """The unit's service."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(SERVING / "penstock.service")
    return parser["Service"]


def test_the_unit_keeps_all_that_it_writes_in_its_state_folder() -> None:
    service = unit()
    assert service["ExecStart"].endswith(" --yes"), "nobody is there to be asked whether smollm2 may be fetched"
    assert f"/var/lib/{service['StateDirectory']}" == STATE
    variables = dict(one.split("=", 1) for one in service["Environment"].split())
    assert set(variables) == {"PENSTOCK_CACHE", "HF_HOME", "TRITON_CACHE_DIR"}
    assert all(value.startswith(f"{STATE}/") for value in variables.values())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "penstock.service"
    path.write_text((SERVING / "penstock.service").read_text().replace(PROGRAM, sys.executable))
    result = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


class UnitProcess(ServerProcess):
    """The unit's command in its environment, with these folders for its state and credentials.

    It has no home folder, and where tests run as root and others can read the packages, nobody runs it.
    """

    def __init__(self, state: Path, credentials: Path) -> None:
        service, self.log, self.url = unit(), credentials / "log", ""
        command = service["ExecStart"].replace(PROGRAM, f"{sys.executable} -m penstock")
        command = command.replace(CREDENTIALS, str(credentials))
        environment = dict(one.split("=", 1) for one in service["Environment"].replace(STATE, str(state)).split())
        packages = {name: os.environ[name] for name in ("PYTHONPATH", "PENSTOCK_CPU_KERNELS") if name in os.environ}
        is_readable = all(folder.stat().st_mode & 1 for folder in Path(sys.executable).resolve().parents)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                shlex.split(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"PATH": os.defpath, "HOME": "/proc", **packages, **environment},
                user=NOBODY if os.geteuid() == 0 and is_readable else None,
            )


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[UnitProcess, Path]]:
    """The unit's server of a GGUF file, and its state folder. Others can read and enter the folders."""
    with tempfile.TemporaryDirectory() as folder:
        state, credentials = Path(folder) / "state", Path(folder) / "credentials"
        for path in (state, credentials):
            path.mkdir()
            path.chmod(0o777)
        Path(folder).chmod(0o755)
        model = write_gguf(tiny_model("llama"), "llama", credentials / "model.gguf")
        model.chmod(0o444)
        options = {"model": str(model), "port": 0, "max-num-seqs": 2, "api-key": "secret"}
        (credentials / "config.yaml").write_text(yaml.safe_dump(options))
        server = UnitProcess(state, credentials)
        try:
            server.wait_until_ready()
            yield server, state
        finally:
            server.close()


@pytest.mark.slow
def test_the_units_command_serves_a_gguf_without_a_home_folder(served: tuple[UnitProcess, Path]) -> None:
    server, state = served
    client = server.client().with_options(api_key="secret")
    completion = client.completions.create(model=client.models.list().data[0].id, prompt=[5, 6], max_tokens=3)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3
    assert list((state / "cache").rglob("*")), "the folder that is made of a GGUF file is in PENSTOCK_CACHE"


@pytest.mark.slow
def test_the_images_health_check_asks_a_server_that_is_ready(served: tuple[UnitProcess, Path]) -> None:
    check = dict(instructions())["HEALTHCHECK"]
    (command,) = re.findall(r"CMD (\[.*\])", check)
    port = served[0].url.rpartition(":")[2]
    for given, code in ((port, 0), ("1", 1)):
        words = [word.replace(":8000", f":{given}") for word in json.loads(command)]
        result = subprocess.run([sys.executable, *words[1:]], capture_output=True, timeout=60)
        assert (words[0], result.returncode) == ("python", code), result.stderr


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, without comments and line breaks."""
    text = re.sub(r"^#.*\n", "", (SERVING / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, arguments) for name, arguments in pairs]


def arguments_of_serve(words: list[str]) -> dict[str, Any]:
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return dict(command.make_context("serve", words).params)


def test_the_image_serves_as_the_command_line_does() -> None:
    found = dict(instructions())
    assert json.loads(found["ENTRYPOINT"]) == ["penstock", "serve"]
    given = arguments_of_serve(json.loads(found["CMD"]))
    assert (given["model_tag"], given["host"], given["port"]) == ("demo", "0.0.0.0", int(found["EXPOSE"]))
    assert "/ready" in found["HEALTHCHECK"]
    assert "/ready" in PUBLIC_PATHS


def test_the_image_has_the_extras_of_a_server_of_gguf_files() -> None:
    (extras,) = re.findall(r'"\.\[(.+)\]"', (SERVING / "Dockerfile").read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"server", "gguf"} == set(extras.split(",")) <= set(known)


def test_compose_keeps_the_caches_of_the_images_user() -> None:
    found = dict(instructions())
    compose = yaml.safe_load((SERVING / "docker-compose.yaml").read_text())
    service = compose["services"]["penstock"]
    (cache,) = [volume.split(":")[1] for volume in service["volumes"] if volume.split(":")[0] in compose["volumes"]]
    assert cache == f"{found['WORKDIR']}/.cache"
    assert any(
        name == "RUN" and f"--owner={found['USER']}" in given and cache in given for name, given in instructions()
    )
    words = [re.sub(r"\$\{\w+:[-?](.*)\}", r"\1", word) for word in service["command"]]
    assert arguments_of_serve(words)["model_tag"] == "demo"


def test_the_images_shell_commands_are_ones(tmp_path: Path) -> None:
    """The folder of caches is made as in the image, and of all commands the shell reads the text."""
    commands = [arguments for name, arguments in instructions() if name == "RUN"]
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True, timeout=60)
    (install,) = [one for command in commands for one in command.split("&&") if "install --directory" in one]
    install = install.replace("=penstock", f"={os.geteuid()}", 1).replace("=penstock", f"={os.getegid()}")
    subprocess.run(["sh", "-c", install.replace("/home/penstock", str(tmp_path))], check=True, timeout=60)
    assert (tmp_path / ".cache").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_is_built_and_serves() -> None:
    builder = next(filter(None, map(shutil.which, ("docker", "podman"))), None)
    if builder is None or subprocess.run([builder, "info"], capture_output=True).returncode:
        pytest.skip("needs docker or podman")
    build = [builder, "build", "--file", str(SERVING / "Dockerfile"), "--tag", "penstock-test", str(ROOT)]
    subprocess.run(build, check=True)
    code = (
        "import gguf, fastapi, penstock; from penstock.kernels.native import NATIVE; assert NATIVE is not None; "
        "print(len(penstock.LLM('demo').generate('a')[0].outputs[0].token_ids))"
    )
    command = [builder, "run", "--rm", "--entrypoint", "python", "penstock-test", "-c", code]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) > 0
