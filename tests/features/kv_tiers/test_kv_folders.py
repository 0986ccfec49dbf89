"""Folders of blocks as a whole: `penstock cache`, prefixes that are saved to archives."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import LLM, SamplingParams
from penstock.cli.app import app
from penstock.errors import ConfigError, InvalidRequest
from penstock.features.kv_files.files import ABOUT, block_files
from penstock.features.kv_files.folder import blocks_in, import_blocks

PLAY = "ROMEO:\n" + "What light through yonder window breaks? It is the east. " * 12
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def archive(root: Path) -> Path:
    """Archive of a prefix, from the folder `first`."""
    (root / "first").mkdir()
    with LLM("demo", kv_offload_dir=str(root / "first")) as llm:
        assert llm.save_prefix(PLAY, root / "play.tar") > 100
        with pytest.raises(ConfigError, match=r"play.tar is there already"):
            llm.save_prefix(PLAY, root / "play.tar")
    return root / "play.tar"


def cache(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_an_engine_with_another_folder_loads_a_prefix(root: Path, archive: Path) -> None:
    (root / "second").mkdir()
    with LLM("demo") as llm:
        expected = llm.generate(PLAY + "\nJULIET:", GREEDY)[0]
    with LLM("demo", kv_offload_dir=str(root / "second")) as llm:
        assert llm.load_prefix(archive) > 5
        assert llm.load_prefix(archive) == 0
        output = llm.generate(PLAY + "\nJULIET:", GREEDY)[0]
        assert llm.save_prefix(PLAY) == output.num_cached_tokens > 100
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_an_engine_without_a_folder_refuses(archive: Path) -> None:
    with LLM("demo") as llm:
        with pytest.raises(InvalidRequest, match="kv_tiers are not enabled in this engine"):
            llm.save_prefix(PLAY)
        with pytest.raises(InvalidRequest, match="Start the engine with kv_offload_dir=FOLDER"):
            llm.load_prefix(archive)


def test_the_commands(root: Path, archive: Path, tmp_path: Path) -> None:
    (row,) = json.loads(cache("ls", root / "first", "--json"))
    assert (row["model"], row["rank"], row["ranks"]) == ("demo", 0, 1)
    assert row["blocks"] > 5
    assert time.time() - row["last_used"] < 600
    table = cache("ls", root / "first")
    assert "demo" in table
    assert "0 of 1" in table
    cache("export", root / "first", tmp_path / "all.tar")
    assert f"Added {row['blocks']:,} blocks" in cache("import", tmp_path, tmp_path / "all.tar")
    assert [one.num_blocks for one in blocks_in(tmp_path)] == [row["blocks"]]
    assert "no such blocks" in cache("export", tmp_path, tmp_path / "none.tar", "--model", "llama", code=2)
    assert "Removed 0 blocks" in cache("rm", tmp_path, "--model", "llama")
    assert "Removed 0 blocks" in cache("rm", tmp_path, "--unused-days", "1")
    for path in tmp_path.rglob("*-0"):
        os.utime(path, (0, 0))
    assert "Name what to remove" in cache("rm", tmp_path, code=2)
    assert f"Removed {row['blocks']:,} blocks" in cache("rm", tmp_path, "--unused-days", "1")
    assert cache("ls", tmp_path).splitlines()[1:] == []
    assert "is not a folder" in cache("ls", tmp_path / "nowhere", code=2)


@pytest.mark.parametrize("name", ["../outside", "kv-1/x", "/etc/passwd", "kv-1/" + "0" * 32 + "/00/../../../x"])
def test_archives_with_other_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.add(tmp_path / "file", name)
    with pytest.raises(ConfigError, match="which is no block of a KV cache"):
        import_blocks(tmp_path / "inside", tmp_path / "bad.tar")
    assert not list((tmp_path / "inside").iterdir())
    with pytest.raises(ConfigError, match="is no archive of KV cache blocks"):
        import_blocks(tmp_path / "inside", tmp_path / "file")


def _bomb(path: Path) -> None:
    with gzip.open(path, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        _add(tar, BLOCK, b"x" * 4096)


def _claims(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        _add(tar, BLOCK, b"x")
        other = tarfile.TarInfo(BLOCK[:-1] + "1")
        other.size = 1 << 60
        tar.fileobj.write(other.tobuf(tarfile.GNU_FORMAT))  # type: ignore[union-attr]


def _claims_long_name(path: Path) -> None:
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 1 << 60
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def _sparse(path: Path) -> None:
    member = tarfile.TarInfo(BLOCK)
    member.type = tarfile.GNUTYPE_SPARSE
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def _cut(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        _add(tar, BLOCK, b"x" * 4096)
    path.write_bytes(path.read_bytes()[:2000])


def _folder(path: Path) -> None:
    path.mkdir()


def _nothing(path: Path) -> None:
    pass


BLOCK = f"kv-1/{'0' * 32}/00/{'0' * 64}-0"


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    "make", [_bomb, _claims, _claims_long_name, _sparse, _cut, _folder, _nothing], ids=lambda make: make.__name__
)
def test_archives_that_are_none_are_refused_before_a_block_is_added(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "inside").mkdir()
    make(tmp_path / "bad.tar")
    with pytest.raises(ConfigError, match=r"bad\.tar"):
        import_blocks(tmp_path / "inside", tmp_path / "bad.tar")
    assert "bad.tar" in cache("import", tmp_path / "inside", tmp_path / "bad.tar", code=2)
    assert not list((tmp_path / "inside").iterdir())


def _write(root: Path, about: str = "{}") -> Path:
    """A block in a folder, and what is said of it."""
    path = root / BLOCK
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    (path.parents[1] / ABOUT).write_text(about)
    return path


@pytest.mark.parametrize("name", ["model", "made", "rank", "content"])
def test_control_characters_in_a_folder_reach_no_terminal(tmp_path: Path, name: str) -> None:
    _write(tmp_path, json.dumps({name: "\x1b[2Jmine\nforged \u202e"}))
    table = cache("ls", tmp_path)
    assert "\\x1b[2Jmine\\nforged" in table
    assert "\x1b" not in table
    assert len(table.splitlines()) == 2


def test_a_description_that_is_nested_deeply_is_none(tmp_path: Path) -> None:
    _write(tmp_path, "[" * 100_000 + "]" * 100_000)
    assert [(one.about, one.num_blocks) for one in blocks_in(tmp_path)] == [({}, 1)]


def test_blocks_that_vanish_while_they_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path)

    def vanishing(folder: Path) -> Iterator[os.DirEntry[str]]:
        for entry in block_files(folder):
            path.unlink()
            yield entry

    monkeypatch.setattr("penstock.features.kv_files.folder.block_files", vanishing)
    assert [one.num_blocks for one in blocks_in(tmp_path)] == [0]


def test_files_that_cannot_be_removed_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        assert "2 files of" in (output := cache("rm", tmp_path, "--all", code=1))
    assert "are not removed: [Errno 13] Permission denied" in output
    assert path.exists()
    assert "Removed 1 blocks" in cache("rm", tmp_path, "--all")
    assert not path.exists()
