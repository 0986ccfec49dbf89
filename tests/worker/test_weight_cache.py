"""Quantised weights of a second start come from the weight cache, with the same bits."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import LoadConfig
from penstock.contract.rpc import RpcCall
from penstock.errors import ConfigError
from penstock.layers.tensors_of import tensors_of
from penstock.worker import weight_cache
from penstock.worker.worker import Worker
from support.checkpoints import tiny_checkpoint
from support.engines import make_core


def weights_of(core: Any) -> list[tuple[str, torch.Tensor]]:
    (found,) = core.collective_rpc(RpcCall(copies_of))
    return found  # type: ignore[no-any-return]


def copies_of(worker: Worker) -> list[tuple[str, torch.Tensor]]:
    return [(one.path, one.tensor.detach().clone()) for one in tensors_of(worker.weights.model)]


def start(folder: Path, cache: Path, **options: Any) -> list[tuple[str, torch.Tensor]]:
    core = make_core(folder, weight_cache_dir=str(cache), **{"quantization": "int4", **options})
    try:
        return weights_of(core)
    finally:
        core.close()


def same(one: list[tuple[str, torch.Tensor]], other: list[tuple[str, torch.Tensor]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def test_a_second_start_reads_what_the_first_packed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(folder, tmp_path / "cache")
    assert len(entries(tmp_path / "cache")) == 1
    monkeypatch.setattr("penstock.worker.weights.load_for_device", None)
    assert same(start(folder, tmp_path / "cache"), first)


def test_other_options_and_a_changed_checkpoint_have_entries_of_their_own(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    start(folder, cache)
    start(folder, cache, quantization="int8")
    assert len(entries(cache)) == 2
    os.utime(folder / "model.safetensors", ns=(1, 1))
    start(folder, cache)
    assert len(entries(cache)) == 3
    with (folder / "model.safetensors").open("r+b") as file:  # as a container with fixed times
        file.seek(-2, 2)
        file.write(b"\0\1")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    start(folder, cache)
    assert len(entries(cache)) == 4


@pytest.mark.parametrize("keeps", [0, 100, -200])
def test_a_damaged_entry_is_written_anew(
    folder: Path, tmp_path: Path, keeps: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(folder, tmp_path / "cache")
    (name,) = entries(tmp_path / "cache")
    path = tmp_path / "cache" / name
    written = path.read_bytes()
    path.write_bytes(written[:keeps] if keeps >= 0 else written[:keeps] + bytes(-keeps))
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert same(start(folder, tmp_path / "cache"), first)
    assert f"{path} is not used, and written anew" in caplog.text
    assert path.read_bytes() == written


def test_a_full_disk_is_left_free(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_cache, "_RESERVE_BYTES", 1 << 62)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        start(folder, tmp_path / "cache")
    assert "It is not written" in caplog.text
    assert entries(tmp_path / "cache") == []


def test_a_folder_that_cannot_be_written_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        start(folder, tmp_path / "cache")
    assert "cannot be written" in caplog.text


def test_float_weights_are_not_kept(folder: Path, tmp_path: Path) -> None:
    start(folder, tmp_path / "cache", quantization=None)
    assert entries(tmp_path / "cache") == []


def test_abandoned_files_are_removed_and_others_stay(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for name, age in (("old.tmp", 1), ("new.tmp", None)):
        (cache / name).touch()
        if age is not None:
            os.utime(cache / name, (age, age))
    start(folder, cache)
    assert "old.tmp" not in entries(cache)
    assert "new.tmp" in entries(cache)


def test_what_is_no_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight_cache_dir=3 is not valid"):
        LoadConfig(weight_cache_dir=3)  # type: ignore[arg-type]
