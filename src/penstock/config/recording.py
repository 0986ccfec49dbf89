"""Options of recording the steps of an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.config.checks import check_flag, check_seconds
from penstock.errors import ConfigError

DEFAULT_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class RecordingConfig:
    """record: file that keeps the messages between scheduler and workers, for `penstock replay`; None for no recording.
        The file before it is kept as FILE.previous. Engines of data_parallel_size write FILE-0, FILE-1 and so on.
    record_window_s: seconds after which the recording begins anew, so that it holds between one and two windows.
    record_prompts: record token ids. Without them a recording shows the steps, but cannot be replayed.
    """

    record: str | os.PathLike[str] | None = None
    record_window_s: float = DEFAULT_WINDOW_S
    record_prompts: bool = False

    def __post_init__(self) -> None:
        is_name = isinstance(self.record, (str, os.PathLike)) and bool(os.fspath(self.record))
        if self.record is not None and not is_name:
            raise ConfigError(f"record={self.record!r} is not valid. Allowed: the name of a file.")
        check_seconds("record_window_s", self.record_window_s)
        check_flag("record_prompts", self.record_prompts)
        if self.record is None:
            if self.record_prompts:
                raise ConfigError("record_prompts=True has no meaning without record. Give record a file's name.")
            return
        path = self.file(None)
        named = f"record={os.fspath(self.record)!r} is not valid"
        if not path.parent.is_dir():
            raise ConfigError(f"{named}: {path.parent} is not a folder. Create it.")
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"{named}: {path.parent} cannot be written to. Give another folder.")
        if os.path.lexists(path) and not path.is_file():
            raise ConfigError(f"{named}: it is a folder, or a device. Allowed: the name of a file.")

    def file(self, engine: int | None) -> Path:
        """File of one engine; engine: its data-parallel rank, None if there is only one. Not without `record`."""
        path = Path(self.record or "").expanduser().absolute()
        return path if engine is None else path.with_name(f"{path.stem}-{engine}{path.suffix}")
