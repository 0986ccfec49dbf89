"""A rank reads only its own part of a GGUF file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from penstock.checkpoints.gguf.container import read_header
from penstock.config import LoadConfig, ModelConfig
from penstock.loader.gguf.blocks import StoredTensor, map_tensors
from penstock.loader.gguf.changes import UNCHANGED, Change, PairsInHalves, Transposed
from penstock.loader.gguf.lazy import LazyTensor
from penstock.loader.loader import load_model
from penstock.loader.tensor_parallel_sizes import UnjoinedGroup
from penstock.parallel import ParallelState
from support.checkpoints import tiny_model
from support.gguf_files import finish, quantised, write_gguf


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of blocks that were dequantised, by tensor."""
    read: Counter[str] = Counter()
    dequantised = StoredTensor.dequantised

    def counted(stored: StoredTensor) -> torch.Tensor:
        read[stored.info.name] += stored.blocks.nbytes
        return dequantised(stored)

    monkeypatch.setattr(StoredTensor, "dequantised", counted)
    return read


def _write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama", intermediate_size=128, vocab_size=96, tie_word_embeddings=False)
    return write_gguf(model, "llama", tmp_path / "tiny.gguf", Type.Q8_0)


def _load(path: Path, parallel: ParallelState, quantization: str | None) -> None:
    config = ModelConfig.load(path, quantization=quantization)
    load_model(config, LoadConfig(), parallel, torch.device("cpu"), torch.float32)


def _stored_bytes(path: Path) -> dict[str, int]:
    return {stored.info.name: stored.blocks.nbytes for stored in map_tensors(read_header(path).tensors)}


@pytest.mark.parametrize("quantization", [None, "none"], ids=["products of blocks", "floats"])
def test_a_rank_of_two_reads_half_of_each_matrix(quantization, tmp_path, monkeypatch, bytes_read):
    path = _write(tmp_path, monkeypatch)
    _load(path, ParallelState(tensor=UnjoinedGroup(2)), quantization)
    matrices = {name: size for name, size in _stored_bytes(path).items() if "norm" not in name}
    assert {name: bytes_read[name] * 2 for name in matrices} == matrices


def test_a_stage_reads_no_layer_of_another(tmp_path, monkeypatch, bytes_read):
    path = _write(tmp_path, monkeypatch)
    _load(path, ParallelState(pipeline=UnjoinedGroup(2)), None)
    elsewhere = [name for name in _stored_bytes(path) if name.startswith(("blk.1.", "output"))]
    assert elsewhere
    assert not bytes_read.keys() & set(elsewhere)


_CHANGES = [UNCHANGED, PairsInHalves(16), Transposed()]


@pytest.mark.parametrize("change", _CHANGES, ids=lambda change: type(change).__name__)
def test_a_part_is_that_part_of_the_whole(change: Change, tmp_path):
    blocks = quantised(np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32), Type.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("one", blocks, raw_dtype=Type.Q8_0)
    finish(writer)
    (stored,) = map_tensors(read_header(tmp_path / "model.gguf").tensors)
    tensor = LazyTensor(stored, change)
    whole = tensor.clone()
    for dim, start, size in [(0, 0, 32), (0, 16, 16), (0, 5, 20), (1, 32, 32), (1, 0, 64), (1, 7, 41), (0, 3, 0)]:
        part = tensor.narrow(dim, start, size)
        assert part.shape == whole.narrow(dim, start, size).shape
        assert torch.equal(part.clone(), whole.narrow(dim, start, size))
    assert torch.equal(torch.cat([tensor[:32], tensor[48:]]), torch.cat([whole[:32], whole[48:]]))
