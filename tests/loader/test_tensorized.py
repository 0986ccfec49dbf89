"""Weights in files of the package tensorizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.config import LoadConfig, ModelConfig
from penstock.errors import CheckpointError, ConfigError, UnsupportedFeature
from penstock.layers.tensors_of import tensors_of
from penstock.loader import tensorized
from penstock.loader.loader import load_model, load_without_memory
from penstock.loader.packed_state import PackedState
from penstock.loader.tensorized import uri_of, write_tensorized
from penstock.parallel import ParallelState
from support.checkpoints import tiny_checkpoint
from support.weight_formats import load

REASON = "the package tensorizer is not installed"


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_model_comes_back_with_the_same_bits(quantization: str | None, tmp_path: Path) -> None:
    pytest.importorskip("tensorizer", reason=REASON)
    tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    config = ModelConfig.load(str(tmp_path), quantization=quantization)
    model = load(config)
    uri = str(tmp_path / "model-%03d.tensors")
    state = PackedState.of(model, config, "cpu", ("float32", "float32"))
    assert write_tensorized(state, uri, ParallelState()) == str(tmp_path / "model-000.tensors")
    options = LoadConfig(load_format="tensorizer", model_loader_extra_config={"tensorizer_uri": uri})
    again = load_model(config, options, ParallelState(), torch.device("cpu"), torch.float32)
    for one, other in zip(tensors_of(again), tensors_of(model), strict=True):
        assert one.path == other.path
        assert torch.equal(one.tensor, other.tensor), one.path
    unloaded, _ = load_without_memory(config, options, ParallelState(), "cpu", torch.float32)
    assert [one.tensor.shape for one in tensors_of(unloaded)] == [one.tensor.shape for one in tensors_of(model)]


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    pytest.importorskip("tensorizer", reason=REASON)
    config = tiny_checkpoint(tmp_path)
    (tmp_path / "model-rank-000.tensors").write_bytes(b"no tensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model-rank-000\.tensors cannot be read by tensorizer"):
            load_model(
                config, LoadConfig(load_format="tensorizer"), ParallelState(), torch.device("cpu"), torch.float32
            )
        (tmp_path / "model-rank-000.tensors").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("{", "is damaged: its penstock_packed_state is no JSON object"),
        ("[1]", "is damaged: its penstock_packed_state is no JSON object"),
        ("[" * 100_000, "is damaged: its penstock_packed_state is no JSON object"),
        ('{"rank": 1, "tensors": {}}', "has the share of rank 1, and its name says rank 0"),
    ],
    ids=["no-json", "list", "deep", "rank"],
)
def test_a_header_that_cannot_be_used_is_named(header: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.tensor(list(header.encode()), dtype=torch.uint8)
    monkeypatch.setattr(tensorized, "_read", lambda path, is_wanted: {"penstock_packed_state": stored})
    with pytest.raises(CheckpointError, match=f"model-000.* {words}"):
        tensorized.open_tensorized("model-%03d.tensors", ParallelState())


def test_addresses() -> None:
    assert uri_of("a") == uri_of({"tensorizer_uri": "a"}) == uri_of(SimpleNamespace(tensorizer_uri="a")) == "a"
    for wrong in (None, "", {}, 3):
        with pytest.raises(ConfigError, match="tensorizer_config=.* is not valid"):
            uri_of(wrong)
    state = PackedState(None, {})
    with pytest.raises(ConfigError, match="is one file for 2 ranks. Add %03d"):
        write_tensorized(state, "model.tensors", ParallelState(world_size=2))
    with pytest.raises(ConfigError, match="tensorizer_uri=.* is not valid"):
        write_tensorized(state, "%s%s", ParallelState())


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorizer", None)
    with pytest.raises(UnsupportedFeature, match=r"penstock\[tensorizer\]"):
        write_tensorized(PackedState(None, {}), str(tmp_path / "a.tensors"), ParallelState())
