"""Files of `--plot`."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from penstock.bench.picture import chart
from penstock.cli.plots import check_plot, write_plot
from penstock.errors import ConfigError


def test_an_svg_is_written_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "plot.SVG"
    check_plot(path)
    assert not path.exists(), "a run that fails leaves no file"
    write_plot(path, chart("a", "b", []))
    assert path.read_text() == chart("a", "b", [])


def test_a_png_has_twice_the_pixels_and_the_texts(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    path, other = tmp_path / "plot.png", tmp_path / "other.png"
    check_plot(path)
    write_plot(path, chart("a", "b", []))
    write_plot(other, chart("another title", "b", []))
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG")
    assert (width, height) == (2 * 748, 2 * 284)
    assert data != other.read_bytes()


def test_a_png_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ConfigError, match=r"needs the package resvg_py for PNG. .* pip install 'penstock\[plots\]'"):
        check_plot(tmp_path / "plot.png")


def test_files_that_cannot_be_plots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plot.pdf is not valid. Allowed: a name that ends in .svg or .png"):
        check_plot(tmp_path / "plot.pdf")
    with pytest.raises(ConfigError, match="plot.svg cannot be opened: No such file"):
        check_plot(tmp_path / "none" / "plot.svg")
