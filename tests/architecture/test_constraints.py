"""The pinned packages are those that the project asks for."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.pin_packages import NOT_PINNED

ROOT = Path(__file__).parents[2]


def test_every_requirement_is_pinned_at_a_version_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    declared = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(
            requirement
            for extra, requirements in extras.items()
            if extra not in NOT_PINNED
            for requirement in requirements
        ),
    ]
    outside = [
        str(requirement)
        for requirement in map(Requirement, declared)
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "none"))
    ]
    assert outside == []
