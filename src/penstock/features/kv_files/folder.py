"""Folders of KV cache blocks as a whole: what is in them, and archives that carry blocks to another folder."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.features.kv_files.files import ABOUT, LAYOUT, block_files, remove_folder, whole_file

# Members of an archive.
_MEMBER = re.compile(rf"{LAYOUT}/[0-9a-f]{{32}}/({re.escape(ABOUT)}|[0-9a-f]{{2}}/[0-9a-f]{{64}}-[0-9]{{1,3}})")


@dataclass(frozen=True)
class Blocks:
    """Blocks of one rank of an arrangement.

    digest: name of their folder. about: what the engine says of itself, such as "model" and "ranks". last_used: Unix
    time; None without blocks.
    """

    digest: str
    about: dict[str, Any]
    num_blocks: int
    num_bytes: int
    last_used: float | None

    @property
    def model(self) -> str:
        return str(self.about.get("model", "?"))


def blocks_in(root: Path) -> list[Blocks]:
    """All blocks of a folder, those that were used last first. Raises ConfigError for what is no folder."""
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder. Name the folder of the option kv_offload_dir.")
    found = []
    for folder in folders_in(root):
        sizes, times = [], []
        for entry in block_files(folder):
            try:
                status = entry.stat()
            except OSError:
                continue  # an engine has removed it
            sizes.append(status.st_size)
            times.append(status.st_mtime)
        found.append(Blocks(folder.name, about_in(folder), len(sizes), sum(sizes), max(times, default=None)))
    return sorted(found, key=lambda one: -(one.last_used or 0.0))


def chosen(blocks: Iterable[Blocks], model: str | None, unused_days: float | None) -> list[Blocks]:
    """Blocks of a model, by a part of its name, that were not used for so many days; None for any."""
    before = time.time() - 86400 * (unused_days or 0.0)
    return [
        one
        for one in blocks
        if (model is None or model in one.model)
        and (unused_days is None or one.last_used is None or one.last_used < before)
    ]


def remove(root: Path, blocks: Iterable[Blocks]) -> list[OSError]:
    """Remove blocks; return why files are not removed. Engines compute again what they do not find."""
    return [failure for one in blocks for failure in remove_folder(root / LAYOUT / one.digest)]


def export_blocks(root: Path, blocks: Iterable[Blocks], archive: Path) -> int:
    """Write blocks to an archive (tar, not compressed); return their number. Raises ConfigError if it is there."""
    paths = [Path(entry.path) for one in blocks for entry in block_files(root / LAYOUT / one.digest)]
    return export_files(root, paths, archive)


def export_files(root: Path, paths: Iterable[Path], archive: Path) -> int:
    """As `export_blocks`, of the files of blocks."""
    if archive.exists():
        raise ConfigError(f"{archive} is there already. Name another file.")
    count, digests = 0, set()
    with whole_file(archive.absolute()) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path in paths:
            digest = path.parents[1]
            if digest not in digests and (digest / ABOUT).exists():
                digests.add(digest)
                _add(tar, root, digest / ABOUT)
            count += _add(tar, root, path)
    return count


def import_blocks(root: Path, archive: Path) -> int:
    """Add the blocks of an archive to a folder; return their number. Those that are there stay.

    Raises ConfigError for what is no archive of blocks, of which none are added then, and for a file system that does
    not take them.
    """
    try:
        # What is not compressed holds no more than its size.
        with tarfile.open(archive, "r:") as tar:
            members = [_checked(member, archive) for member in tar]
            return sum(_extract(tar, member, root) for member in members)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{archive} is no archive of KV cache blocks: {error or type(error).__name__}.") from error
    except OSError as error:
        raise ConfigError(f"The blocks of {archive} cannot be added to {root}: {error}.") from error


def _checked(member: tarfile.TarInfo, archive: Path) -> tarfile.TarInfo:
    """A member that is a block, or says whose they are. Raises ConfigError for anything else."""
    if not member.isfile() or member.issparse() or not _MEMBER.fullmatch(member.name):
        raise ConfigError(f"{archive} has {member.name!r}, which is no block of a KV cache.")
    if not 0 <= member.size <= archive.stat().st_size - member.offset_data:
        raise ConfigError(f"{archive} has {member.name!r} of {member.size:,} bytes, and is shorter than that.")
    return member


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> int:
    """Add a member to a folder, unless it is there; return the number of blocks."""
    path, content = root / member.name, tar.extractfile(member)
    if path.exists() or content is None:
        return 0
    with whole_file(path) as file:
        shutil.copyfileobj(content, file, 1 << 20)
    return int(path.name != ABOUT)


def _add(tar: tarfile.TarFile, root: Path, path: Path) -> int:
    """Add a file, if it is there still; return the number of files."""
    try:
        tar.add(path, str(path.relative_to(root)), recursive=False)
    except FileNotFoundError:
        return 0
    return 1


def folders_in(root: Path) -> Iterator[Path]:
    if (root / LAYOUT).is_dir():
        yield from sorted(path for path in (root / LAYOUT).iterdir() if path.is_dir())


def about_in(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}
