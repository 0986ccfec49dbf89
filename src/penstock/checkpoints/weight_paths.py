"""Weight files of a model folder."""

from __future__ import annotations

from pathlib import Path

_SUFFIXES = (".safetensors", ".bin", ".gguf")


def weight_paths(folder: Path) -> list[Path]:
    """Weight files in a folder, of all formats, by name."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(_SUFFIXES) and path.is_file())
