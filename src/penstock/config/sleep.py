"""Options of engines that sleep."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.config.checks import check_seconds
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SleepConfig:
    """sleep_dir: folder for the weights of an engine on a CPU that sleeps at level 1; None for the system's temporary
        folder. A file there has no name, and ends with the sleep or its process.
    sleep_idle_seconds: seconds without a request after which the engine sleeps by itself, at level 1, until the next
        request; None for never.
    """

    sleep_dir: str | os.PathLike[str] | None = None
    sleep_idle_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.sleep_idle_seconds is not None:
            check_seconds("sleep_idle_seconds", self.sleep_idle_seconds)
        if self.sleep_dir is not None and not self.folder.is_dir():
            raise ConfigError(f"sleep_dir={os.fspath(self.sleep_dir)!r} is not a folder. Create it, or leave it out.")

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return Path(tempfile.gettempdir() if self.sleep_dir is None else self.sleep_dir).expanduser().absolute()
