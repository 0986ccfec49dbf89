"""Files of `--plot`."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.failures import file_named
from penstock.errors import ConfigError


def check_plot(path: Path | None) -> None:
    """Refuse a file that cannot be written, or is no SVG, before the measurement."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {path} is not valid. Allowed: a name that ends in .svg; browsers convert it to PNG.")
    with file_named("--plot", path), path.open("a"):
        pass


def write_plot(path: Path, svg: str) -> None:
    """Write a picture."""
    with file_named("--plot", path):
        path.write_text(svg, encoding="utf-8")
