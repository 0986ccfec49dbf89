"""API key of a server, as its clients send it."""

from __future__ import annotations


def authorization(key: str | None) -> dict[str, str]:
    """Headers with a key, in UTF-8; none without a key. Header values are sent as Latin-1, a byte per character."""
    if key is None:
        return {}
    return {"Authorization": f"Bearer {key}".encode("utf-8", "surrogateescape").decode("latin-1")}
