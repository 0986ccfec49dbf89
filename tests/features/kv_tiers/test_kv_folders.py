"""Folders of blocks as a whole: `penstock cache`, prefixes that are saved to archives."""

from __future__ import annotations

import json
import os
import tarfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import LLM, SamplingParams
from penstock.cli.app import app
from penstock.errors import ConfigError, InvalidRequest
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
