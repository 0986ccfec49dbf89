"""Writes constraints.txt: the newest versions of every package that any extra brings, transitive ones too.

python tools/pin_packages.py TORCH OUTPUT

TORCH: requirement of torch, such as torch==2.13.0. Uses pip's dry run; nothing is installed. Run it with the oldest
supported Python, since packages with a version for it have one for newer ones too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What a build and an installation themselves take.
INSTALLERS = ("pip", "setuptools")
# Extras that no development environment has: this one brings triton.
NOT_PINNED = {"gpu"}
_HEADER = """\
# Every package, as the tests passed with it last. `make upgrade` renews this file; pyproject.toml has the ranges that
# are supported.
"""


def resolve(torch: str) -> list[dict[str, Any]]:
    """Versions that pip would install for all pinned extras. Raises CalledProcessError when pip finds no solution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ",".join(sorted(set(project["optional-dependencies"]) - NOT_PINNED))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    report = subprocess.run([*command, torch, *INSTALLERS, f"{ROOT}[{extras}]"], stdout=subprocess.PIPE, check=True)
    return [
        item["metadata"] for item in json.loads(report.stdout)["install"] if item["metadata"]["name"] != project["name"]
    ]


def constraints(packages: list[dict[str, Any]]) -> str:
    """Constraint lines, sorted by name, without local versions ("+cpu")."""
    pins = {package["name"].lower().replace("_", "-"): package["version"].split("+")[0] for package in packages}
    return _HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


if __name__ == "__main__":
    torch, output = sys.argv[1:]
    Path(output).write_text(constraints(resolve(torch)))
