"""Bytes of media from paths, file:, data: and http URLs, where they are allowed."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.contract.param_checks import shown
from penstock.errors import ConfigError, InvalidMedia
from penstock.media.base64_text import base64_bytes
from penstock.media.download import DownloadLimits, download

_ALLOWED = "Allowed: a data:, http:, https: or file: URL, or a path"
# A data URL of this type has a frame's JPEG file per part, separated by commas.
JPEG_FRAMES = "video/jpeg"


class MediaSources:
    """Reader of media files. Any thread may call it.

    local_path: folder of the files that texts may name, as a path or a file: URL; None allows none. A `pathlib.Path`
        is always read: only the program itself can give one, and no request can.
    domains: names of servers from which texts may fetch; None allows all that are public, an empty list none.

    Raises ConfigError for a folder that does not exist, InvalidMedia for a file that is not allowed or not there.
    """

    def __init__(
        self,
        local_path: str | Path | None = None,
        domains: Sequence[str] | None = None,
        limits: DownloadLimits | None = None,
    ) -> None:
        self._folder = None if not local_path else Path(local_path).resolve()
        self._domains = domains
        self._limits = limits or DownloadLimits()
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"allowed_local_media_path={str(local_path)!r} is not a folder. Allowed: a folder.")

    def read(self, source: str | Path) -> bytes:
        """Content of a file."""
        if isinstance(source, Path):
            return self._file(source)
        scheme = source[:8].partition(":")[0].lower()
        if scheme == "data":
            return self._data(source)
        if scheme in ("http", "https"):
            return download(source, self._domains, self._limits)
        return self._local(source, scheme)

    def frames(self, source: str) -> list[bytes] | None:
        """Files of a video's frames, in a data: URL of JPEG files; None for any other source."""
        kind = f"data:{JPEG_FRAMES};"
        if source[: len(kind)].lower() != kind:
            return None
        head, _, payload = source.partition(",")
        return [self._decoded(part, head) for part in payload.split(",")]

    def _data(self, url: str) -> bytes:
        head, comma, payload = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidMedia(f"{shown(url)} is not valid. Allowed: data:<type>;base64,<data>.")
        return self._decoded(payload, head)

    def _decoded(self, payload: str, head: str) -> bytes:
        if len(payload) > self._limits.max_bytes * 4 // 3 + 4:
            raise self._too_large(head, len(payload) * 3 // 4)
        try:
            return base64_bytes(payload)
        except ValueError as error:
            raise InvalidMedia(f"{shown(head)} has data that are not base64: {error}.") from None

    def _local(self, source: str, scheme: str) -> bytes:
        """Content of a file in the folder that is allowed; links are followed first."""
        named = source
        if scheme == "file":
            parts = urlsplit(source)
            if parts.netloc not in ("", "localhost"):
                raise InvalidMedia(f"{shown(source)} names another machine. {_ALLOWED}.")
            named = unquote(parts.path)
        elif "://" in source[:32]:
            raise InvalidMedia(f"{shown(source)} is not allowed. {_ALLOWED}.")
        if self._folder is None:
            raise InvalidMedia(
                f"{shown(source)} names a file, and no files are allowed. Start the engine with "
                "allowed_local_media_path, or give a data: URL; a program may give a pathlib.Path."
            )
        try:
            path = (self._folder / named).resolve()
        except (OSError, ValueError, RuntimeError):
            raise InvalidMedia(f"{shown(source)} is not a path. {_ALLOWED}.") from None
        if not path.is_relative_to(self._folder):
            raise InvalidMedia(f"{shown(source)} is not in the folder that is allowed (allowed_local_media_path).")
        return self._file(path, flags=os.O_NOFOLLOW)

    def _file(self, path: Path, flags: int = 0) -> bytes:
        try:
            # Without waiting for the other end of a pipe, which is refused below.
            opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
        except OSError as error:
            raise InvalidMedia(f"{shown(str(path))} cannot be read: {error.strerror}.") from None
        except ValueError:
            raise InvalidMedia(f"{shown(str(path))} is not a path.") from None
        try:
            state = os.fstat(opened)
            if not stat.S_ISREG(state.st_mode):
                raise InvalidMedia(f"{shown(str(path))} is not a file.")
            if state.st_size > self._limits.max_bytes:
                raise self._too_large(str(path), state.st_size)
            with open(opened, "rb", closefd=False) as file:
                return file.read(self._limits.max_bytes)
        except OSError as error:
            raise InvalidMedia(f"{shown(str(path))} cannot be read: {error.strerror}.") from None
        finally:
            os.close(opened)

    def _too_large(self, name: str, num_bytes: int) -> InvalidMedia:
        return InvalidMedia(
            f"{shown(name)} has {num_bytes:,} bytes. Allowed: {self._limits.max_bytes:,}. Give a smaller file."
        )
