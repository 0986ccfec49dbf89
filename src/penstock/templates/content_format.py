"""Contents of messages as a chat template takes them: one text each, or lists of parts.

Parts are texts, or stand for an image, audio or a video: {"type": "image", MARKER: its text in a content of text}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MARKER = "marker"
AUTO, STRING, OPENAI = CONTENT_FORMATS = ("auto", "string", "openai")
# A loop over the parts of a content, and a test whether it has any.
_LOOP = re.compile(r"""\bfor\s+\w+\s+in\s+(?:\w+\.content\b|\w+\[\s*['"]content['"]\s*\]|content\b)""")
_TEST = re.compile(r"\bis\s+(?:not\s+)?string\b")


def in_content_format(message: Mapping[str, Any], source: str, content_format: str) -> dict[str, Any]:
    """Message whose content is a text or a list of parts, as the template takes it.

    content_format: "string" joins parts by line breaks, "openai" makes a list of parts of a text; "auto" does what the
    template's text says: it loops over the parts of a content, and then either takes texts too, or does not.
    """
    content = message.get("content")
    if content_format == AUTO:
        content_format = STRING if not _LOOP.search(source) else AUTO if _TEST.search(source) else OPENAI
    if content_format == STRING and isinstance(content, list):
        content = "\n".join(part[MARKER] if MARKER in part else part["text"] for part in content)
    elif content_format == OPENAI and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(content, list):
        content = [{name: value for name, value in part.items() if name != MARKER} for part in content]
    return {**message, "content": content} if "content" in message else dict(message)
