"""Options of KV cache blocks that are kept outside of the KV cache."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KVTierConfig:
    """kv_offload_dir: folder for blocks of the KV cache, which later requests load, also after a restart, and of other
        engines that share the folder; None keeps none.
    kv_offload_dir_size: GiB of all files in this folder; the least recently used ones make room.
    """

    kv_offload_dir: str | os.PathLike[str] | None = None
    kv_offload_dir_size: float = 16.0

    def __post_init__(self) -> None:
        size = self.kv_offload_dir_size
        is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
        if not is_number or not math.isfinite(size) or size <= 0:
            raise ConfigError(f"kv_offload_dir_size={size!r} is not valid. Allowed: a number of GiB above 0.")
        folder = self.folder
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"kv_offload_dir={str(folder)!r} is not a folder. Create it, or leave it out.")
        if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"kv_offload_dir={str(folder)!r} cannot be written to. Give another folder.")

    @property
    def folder(self) -> Path | None:
        """The folder; None to keep no blocks."""
        given = self.kv_offload_dir
        return None if given is None else Path(given).expanduser().absolute()

    @property
    def max_bytes(self) -> int:
        """Bytes of all files."""
        return int(self.kv_offload_dir_size * _GIB)
