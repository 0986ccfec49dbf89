"""Bodies of uploads: `multipart/form-data` (RFC 7578)."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from penstock.server.http.errors import ApiError

_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary="?([^";,]+)"?', re.IGNORECASE)
_NAME = re.compile(r'\bname="?([^";\r\n]+)"?')
_FILENAME = re.compile(r'\bfilename="?([^";\r\n]+)"?')
_MOST_PARTS = 16


@dataclass(frozen=True, slots=True)
class FormPart:
    """Part of a form. filename: of a file; None for a field."""

    data: bytes
    filename: str | None = None


def form_parts(content_type: str, body: bytes) -> dict[str, FormPart]:
    """Parts of a form by name. Raises ApiError for a body that is none."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise ApiError(400, f"The Content-Type is {content_type!r}. Allowed: multipart/form-data with a boundary.")
    # A boundary is a whole line.
    boundary = re.escape(found[1].strip().encode("latin-1"))
    places = list(re.finditer(rb"(?:\A|\r\n)--" + boundary + rb"(--)?[ \t]*(?=\r\n|\Z)", body))
    ends = [number for number, place in enumerate(places) if place[1]]
    if not ends or not 0 < ends[0] <= _MOST_PARTS:
        raise ApiError(400, "The body is no form: its boundary does not end it, or it has too many parts.")
    parts = {}
    for place, following in itertools.pairwise(places[: ends[0] + 1]):
        head, _, data = body[place.end() : following.start()].partition(b"\r\n\r\n")
        text = head.decode("utf-8", "replace")
        name, filename = _NAME.search(text), _FILENAME.search(text)
        if name is None:
            raise ApiError(400, "The form has a part without a name.")
        parts[name[1]] = FormPart(data, None if filename is None else filename[1])
    return parts
