"""Output files where the system does not let everything be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from penstock.cli.output_file import PartialFile, output_file


def test_a_file_that_cannot_be_replaced_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.write_text("before, and longer than what comes")
    number = target.stat().st_ino

    def busy(*_: Any) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    with output_file(target) as file:
        assert isinstance(file, PartialFile)
        file.put(0, "after")
    assert target.read_text() == "after"
    assert target.stat().st_ino == number
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_in_a_folder_that_takes_no_other_file_it_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.write_text("before")
    opened = Path.open

    def refuse_new(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "x" in mode:
            raise PermissionError(13, "Permission denied")
        return opened(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse_new)
    with output_file(target) as file:
        assert not isinstance(file, PartialFile)
        file.write(b"after")
    assert target.read_text() == "after"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_failed_replacement_had_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OSError, match="No space left"), output_file(target) as file:
        cast(PartialFile, file).put(0, "after\n")
    assert (tmp_path / "out.partial").read_text() == "after\n"
    assert f"1 line is in {target}.partial" in capsys.readouterr().err
