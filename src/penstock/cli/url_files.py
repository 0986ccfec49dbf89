"""Files behind URLs: an input that is downloaded, and an output that is uploaded (HTTP PUT)."""

from __future__ import annotations

import http.client
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import ConfigError

_MOST_BYTES = 1 << 30
# Longest silence of the other side, and longest download.
_TIMEOUT_S, _LONGEST_S = 60.0, 900.0
_CHUNK_BYTES = 1 << 20


def is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


@contextmanager
def local_input(flag: str, path: str) -> Iterator[Path]:
    """Path of a file, or of the content of a URL. flag: option that gives it. Raises ConfigError."""
    if not is_url(path):
        yield Path(path)
        return
    deadline_s = time.monotonic() + _LONGEST_S
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "input.jsonl"
        with (
            _failures(flag, path, "read", "Download it, and give the file."),
            target.open("wb") as file,
            urllib.request.urlopen(path, timeout=_TIMEOUT_S) as response,
        ):
            while chunk := response.read1(_CHUNK_BYTES):
                file.write(chunk)
                if file.tell() > _MOST_BYTES:
                    raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
                if time.monotonic() > deadline_s:
                    raise ValueError(f"it takes more than {_LONGEST_S:g} s")
        yield target


@contextmanager
def local_output(flag: str, path: str) -> Iterator[Path]:
    """Path of a file that is written, and then sent to the URL if there is one. It is kept if that fails.

    flag: option that gives it. Raises ConfigError.
    """
    if not is_url(path):
        yield Path(path)
        return
    folder = Path(tempfile.mkdtemp())
    target = folder / "output.jsonl"
    try:
        yield target
    finally:
        if target.exists():
            headers = {"Content-Type": "application/jsonl", "Content-Length": str(target.stat().st_size)}
            advice = f"The answers are in {target}. Send them with: curl -T {target} URL"
            with _failures(flag, path, "written", advice), target.open("rb") as file:
                request = urllib.request.Request(path, file, headers, method="PUT")
                urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
            target.unlink()
        # Other files are answers of a run that ended early.
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _failures(flag: str, url: str, done: str, advice: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException) as error:
        # Queries of URLs have signatures.
        raise ConfigError(f"{flag} {url.partition('?')[0]} cannot be {done}: {error}. {advice}") from error
