"""Options of the live view of an engine without a server."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

# Addresses that are no paths: a URL, or a host and a port.
_ADDRESS = re.compile(r"\w+://.*|[^/]*:\d+")


@dataclass(frozen=True, slots=True)
class LiveViewConfig:
    """live_view: path of a Unix socket at which `LLM` serves its live view, for `penstock top --uds`; None for none.
    The socket is removed when the engine is closed.
    """

    live_view: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.live_view is None:
            return
        is_path = isinstance(self.live_view, (str, os.PathLike)) and bool(os.fspath(self.live_view))
        if not is_path or _ADDRESS.fullmatch(os.fspath(self.live_view)):
            raise ConfigError(f"live_view={self.live_view!r} is not valid. Allowed: the path of a Unix socket.")
        folder = self.path.parent
        if not folder.is_dir():
            raise ConfigError(
                f"live_view={os.fspath(self.live_view)!r} is not valid: {folder} is not a folder. Create it."
            )

    @property
    def path(self) -> Path:
        """Absolute path of the socket. Not without `live_view`."""
        return Path(self.live_view or "").expanduser().absolute()
