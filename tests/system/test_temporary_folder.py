"""Temporary folders: in use, given back, and left behind by processes that were killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.system.temporary_folder import TemporaryFolder

LEAVE = """
import os, signal, sys
from pathlib import Path
from penstock.system.temporary_folder import TemporaryFolder
folder = TemporaryFolder("own-", Path(sys.argv[1]))
(folder.path / "secret").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVE, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert {path.name for path in left.iterdir()} == {"secret", ".penstock-lock"}
    alike = [tmp_path / "own-by-hand", tmp_path / "own-file", tmp_path / "own-link"]
    alike[0].mkdir()
    alike[1].touch()
    alike[2].symlink_to(left)
    with TemporaryFolder("own-", tmp_path) as first, TemporaryFolder("own-", tmp_path) as second:
        assert {*tmp_path.iterdir()} == {first.path, second.path, *alike}
    assert {*tmp_path.iterdir()} == {*alike}


def test_a_folder_ends_with_its_object_and_with_its_process(tmp_path: Path) -> None:
    folder = TemporaryFolder("own-", tmp_path)
    assert folder.path.stat().st_mode & 0o077 == 0
    del folder
    assert not list(tmp_path.iterdir())
    subprocess.run([sys.executable, "-c", LEAVE.rpartition("os.kill")[0], str(tmp_path)], check=True)
    assert not list(tmp_path.iterdir())
