"""Images, audio and video of a command's options, as parts of a message."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from penstock.cli.failures import read_file

Content: TypeAlias = str | list[dict[str, Any]]
_SCHEMES = ("http:", "https:", "data:")


def media_part(modality: str, place: str, option: str) -> dict[str, Any]:
    """Part of a message with an item. place: a file, or a URL. option: that names it, for errors.

    Raises ConfigError for a file that cannot be read.
    """
    if not place.lower().startswith(_SCHEMES):
        content = read_file(option, Path(place))
        place = f"data:application/octet-stream;base64,{base64.b64encode(content).decode()}"
    kind = f"{modality}_url"
    return {"type": kind, kind: {"url": place}}


def with_media(text: str, parts: Sequence[dict[str, Any]]) -> Content:
    """Content of a message: a text, after these parts."""
    return [*parts, {"type": "text", "text": text}] if parts else text


def shown_content(content: Content) -> str:
    """Text of a content, with a word for each of its other parts."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if "text" in part else f"[{part['type'].removesuffix('_url')}]" for part in content)
