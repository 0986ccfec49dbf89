"""Virtual environments of client programs, with pinned packages, apart from Penstock's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from site import getsitepackages

ROOT = Path(__file__).resolve().parents[2]
# Programs that import vLLM's names, and these names.
_OF_TRAINERS = ("trl==1.16.0", "lm-eval==0.4.13", "-e", str(ROOT / "integrations" / "vllm-names"))
_FOLDER = ROOT / ".venv-clients"


def client_python(name: str, packages: Sequence[str], *, has_penstock: bool = False) -> Path:
    """Python of an environment with these packages, which is made once. has_penstock: with this one's packages, too.

    Raises subprocess.CalledProcessError where pip cannot install them.
    """
    folder = _FOLDER / name
    python, note = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join(packages)
    if not note.exists() or note.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        if has_penstock:
            (site,) = folder.glob("lib/*/site-packages")
            beside = [ROOT / "src", *getsitepackages()]
            (site / "beside.pth").write_text("".join(f"{one}\n" for one in beside))
        _pip(python, "install", *packages)
        note.write_text(wanted)
    return python


def trainer_python() -> Path:
    """Python of an environment with TRL and lm-eval, and Penstock by vLLM's names. Raises as `client_python`."""
    return client_python("trainers", _OF_TRAINERS, has_penstock=True)


def source_of(python: Path, package: str) -> Path:
    """Unpacked source distribution of a package, such as "openai==3.57.0"; it is downloaded once."""
    folder = _FOLDER / "sources"
    unpacked = folder / package.replace("==", "-")
    if not unpacked.exists():
        name = package.partition("==")[0]
        _pip(python, "download", "--no-binary", name, "--no-deps", "--dest", folder, package)
        shutil.unpack_archive(folder / f"{unpacked.name}.tar.gz", folder, filter="data")
    return unpacked


def _pip(python: Path, *arguments: str | Path) -> None:
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)
