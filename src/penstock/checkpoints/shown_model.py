"""Names of models in messages that clients of a server may get: without folders of its machine."""

from __future__ import annotations

import re
from pathlib import Path

# Model folder of a GGUF file in the cache folder: the file's name and the fingerprint of its version.
_OF_GGUF_FILE = re.compile(r"(.+)-[0-9a-f]{16}")


def shown_model(model: str | Path) -> str:
    """Return the name of a model: of a folder its last part, of one in the hub's cache the hub id, of a GGUF file's
    model folder the file.
    """
    path = Path(model)
    if path.parent.name == "snapshots":
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    if path.parent.name == "gguf" and (file := _OF_GGUF_FILE.fullmatch(path.name)):
        return f"{file[1]}.gguf"
    return path.name if path.is_absolute() else str(model)
