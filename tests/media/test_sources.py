"""Texts name only files and data that are allowed; a path of the program itself is read."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import pytest

from penstock.errors import ConfigError, InvalidMedia
from penstock.media.download import DownloadLimits
from penstock.media.sources import MediaSources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (allowed / "a b.png").write_bytes(b"inside")
    (allowed / "sub" / "c.png").write_bytes(b"deeper")
    (tmp_path / "secret.png").write_bytes(b"outside")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "d.png").write_bytes(b"outside")
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    (allowed / "inner.png").symlink_to("sub/c.png")
    return allowed


def test_files_in_the_allowed_folder_are_read_by_path_and_by_url(folder: Path) -> None:
    sources = MediaSources(folder)
    for name in (
        "a b.png",
        str(folder / "a b.png"),
        f"file://{folder}/a%20b.png",
        f"FILE://localhost{folder}/a%20b.png",
    ):
        assert sources.read(name) == b"inside"
    assert sources.read("sub/c.png") == sources.read("inner.png") == b"deeper"


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "sub/../../secret.png", "{}/../secret.png", "file://{}/../secret.png", "file://{}/%2e%2e/secret.png",
     "{}-not/d.png", "link.png", "/etc/hostname", "/proc/self/environ", "file:///etc/hostname"],
)  # fmt: skip
def test_no_file_outside_of_the_folder_is_read(folder: Path, name: str) -> None:
    with pytest.raises(InvalidMedia, match="not in the folder that is allowed"):
        MediaSources(folder).read(name.format(folder))


@pytest.mark.parametrize("name", ["a b.png", "file:///etc/hostname", "/etc/hostname"])
def test_texts_name_no_file_unless_a_folder_is_allowed(name: str) -> None:
    with pytest.raises(InvalidMedia, match="allowed_local_media_path"):
        MediaSources().read(name)


def test_a_path_of_the_program_is_read_without_a_folder(folder: Path) -> None:
    assert MediaSources().read(folder / "a b.png") == b"inside"


@pytest.mark.parametrize("name", ["file://server/a.png", "ftp://server/a.png", "s3://a/b.png", "gopher://x"])
def test_a_scheme_or_machine_that_is_not_read_is_named(folder: Path, name: str) -> None:
    with pytest.raises(InvalidMedia, match=re.escape(name)):
        MediaSources(folder).read(name)


@pytest.mark.timeout(20)
def test_what_is_not_a_file_is_refused_without_waiting(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    for path in (folder / "pipe.png", folder / "sub", Path("/dev/zero")):
        with pytest.raises(InvalidMedia, match="is not a file"):
            MediaSources(folder).read(path)


@pytest.mark.parametrize("name", ["missing.png", "a\x00b", "x" * 5000])
def test_a_file_that_is_not_there_is_named(folder: Path, name: str) -> None:
    with pytest.raises(InvalidMedia, match=r"cannot be read|is not a path"):
        MediaSources(folder).read(name)


def test_files_and_data_beyond_the_limit_are_refused(folder: Path) -> None:
    sources = MediaSources(folder, limits=DownloadLimits(max_bytes=5))
    with pytest.raises(InvalidMedia, match="6 bytes. Allowed: 5"):
        sources.read("a b.png")
    with pytest.raises(InvalidMedia, match="Allowed: 5"):
        sources.read("data:image/png;base64," + base64.b64encode(b"x" * 9).decode())


def test_data_urls_are_decoded_and_damaged_ones_are_refused() -> None:
    sources = MediaSources()
    for url in ("data:image/png;base64,aGk=", "DATA:;BASE64,aGk=", "data:image/png;base64, aG\r\nk =\n"):
        assert sources.read(url) == b"hi"
    frames = "data:video/jpeg;base64,aG\nk=, aGk="
    assert sources.frames(frames) == [b"hi", b"hi"]
    for damaged in (
        "data:image/png;base64,aGk",
        "data:image/png;base64,aG-k",
        "data:image/png;base64,aGk=é",
        "data:image/png,hi",
        "data:",
        "data:;base64",
    ):
        with pytest.raises(InvalidMedia, match="Allowed: data:|not base64"):
            sources.read(damaged)


def test_an_allowed_folder_has_to_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed_local_media_path"):
        MediaSources(tmp_path / "missing")
