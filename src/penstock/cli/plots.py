"""Files of `--plot`: pictures as SVG, or as PNG with the package resvg-py."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.failures import check_writable, file_named
from penstock.errors import ConfigError

_SUFFIXES = (".svg", ".png")
# Pixels of a PNG per unit of the SVG, for screens of high density.
_ZOOM = 2
_SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16">{}</svg>'


def check_plot(path: Path | None) -> None:
    """Refuse a file that cannot be written, another format, or a PNG that cannot be drawn, before the measurement."""
    if path is None:
        return
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path} is not valid. Allowed: a name that ends in {' or '.join(_SUFFIXES)}.")
    if suffix == ".png" and not _has_font():
        raise ConfigError(
            f"--plot {path} needs the font DejaVu Sans or Arial. Install one, such as Debian's package "
            "fonts-dejavu-core, or name a file that ends in .svg."
        )
    check_writable("--plot", path)


def write_plot(path: Path, svg: str) -> None:
    """Write a picture in the format that the file's name says."""
    data = _as_png(svg) if path.suffix.lower() == ".png" else svg.encode()
    with file_named("--plot", path):
        path.write_bytes(data)


def _has_font() -> bool:
    """Whether texts of the pictures show; resvg has no font of its own."""
    from penstock.bench.picture import FONTS

    return _as_png(_SVG.format(f'<text y="12" font-family="{FONTS}">x</text>')) != _as_png(_SVG.format(""))


def _as_png(svg: str) -> bytes:
    """Picture in its light colours."""
    try:
        import resvg_py
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--plot needs the package {error.name} for PNG. Install the extra: pip install 'penstock[plots]'; or name "
            "a file that ends in .svg."
        ) from error
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=_ZOOM))
