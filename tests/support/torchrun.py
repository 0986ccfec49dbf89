"""Programs that torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(folder: Path, program: str, *arguments: object, beside: Path, size: int = 2) -> subprocess.Popen[str]:
    """Start so many processes of a program, which is written into the folder.

    beside: a file next to which it finds modules, besides those that this process finds.
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
