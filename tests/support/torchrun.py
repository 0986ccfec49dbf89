"""Scripts under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(folder: Path, program: str, *arguments: object, beside: Path, size: int = 2) -> subprocess.Popen[str]:
    """Start `size` processes of a script, which is written into the folder.

    beside: a file whose folder is added to the script's import path.
    """
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    search_path = os.pathsep.join([str(beside.parent), *sys.path])
    return subprocess.Popen(
        [*command, str(path), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
