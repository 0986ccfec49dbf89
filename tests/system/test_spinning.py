"""How long idle threads of torch's OpenMP runtime spin."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.system import env

_READ = "import os, penstock; penstock.SamplingParams; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["default", "given", "by policy"],
)
def test_threads_sleep_soon_unless_the_environment_says_else(given: dict[str, str], found: str) -> None:
    unset = {name: value for name, value in env.with_changes({}).items() if name not in _NAMES}
    printed = subprocess.check_output([sys.executable, "-c", _READ], env={**unset, **given}, text=True)
    assert printed.strip() == found


_NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
