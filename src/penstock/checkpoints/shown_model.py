"""Names of models in messages that clients of a server may get: without folders of its machine."""

from __future__ import annotations

from pathlib import Path


def shown_model(model: str | Path) -> str:
    """Return the name of a model: of a folder its last part, of one in the hub's cache the hub id."""
    path = Path(model)
    if path.parent.name == "snapshots":
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name if path.is_absolute() else str(model)
