"""Files of sound and video that av reads."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import InvalidMedia
from penstock.media.item import package

# None of these formats refers to other files, as playlists do.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,mp3,aac,flac,wav,gif,asf,amr"


@contextmanager
def opened(content: bytes, modality: str) -> Iterator[Any]:
    """Container of av. Raises InvalidMedia for one without the modality, and for what av raises meanwhile."""
    library = package("av", "Videos and sound of many formats", "video")
    try:
        with library.open(io.BytesIO(content), options={"format_whitelist": _FORMATS}) as file:
            streams = getattr(file.streams, modality)
            if not streams or streams[0].codec_context is None:
                raise InvalidMedia(f"It has no {modality} that can be decoded.")
            yield file
    except library.FFmpegError as error:
        raise InvalidMedia(f"It is no {modality} that can be read: {error.strerror}.") from None
