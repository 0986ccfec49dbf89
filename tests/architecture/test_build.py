"""The build of the C++ kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_KERNELS = "src/penstock/kernels/native/csrc"
_LIST_DEPENDENCIES = """
import runpy, setuptools
arguments = {}
setuptools.setup = arguments.update
runpy.run_path("setup.py")
project = setuptools.Distribution(arguments)
project.parse_config_files()
build = project.get_command_obj("build_ext")
build.ensure_finalized()
(extension,) = build.extensions
print("\\n".join(extension.sources), "\\n".join(extension.depends), sep="\\n---\\n")
"""


def test_every_file_of_the_kernels_is_compiled_or_builds_them_anew_when_it_changes() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", _LIST_DEPENDENCIES], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    sources, depends = (set(part.split()) for part in listed.stdout.split("---"))
    files = {f"{_KERNELS}/{path.name}" for path in (ROOT / _KERNELS).iterdir()}
    assert sources == {name for name in files if name.endswith(".cpp")}
    assert depends >= files
