"""ID:QUANTISATION names a GGUF file of a repository, as in a hub cache without a network."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.checkpoints.resolve import resolve_metadata_folder
from penstock.config import ModelConfig
from penstock.errors import ModelNotFound, UnsupportedModel
from support.checkpoints import tiny_model
from support.gguf_files import finish, write_gguf

_COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Snapshot of someone/tiny-GGUF in the hub cache."""
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    root = cache / "models--someone--tiny-GGUF"
    snapshot = root / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(_COMMIT)
    write_gguf(tiny_model("llama"), "llama", snapshot / "tiny-Q4_K_M.gguf")
    write_gguf(tiny_model("qwen3"), "qwen3", snapshot / "tiny.q8_0.gguf")
    return snapshot


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("Q4_K_M", "LlamaForCausalLM"), ("q4_k_m", "LlamaForCausalLM"), ("Q8_0", "Qwen3ForCausalLM")],
)
def test_the_end_of_a_files_name_chooses_it_in_any_case(repository: Path, name: str, architecture: str) -> None:
    model = f"someone/tiny-GGUF:{name}"
    assert ModelConfig.load(model).architecture == architecture
    folder, is_on_hub = resolve_metadata_folder(model)
    assert (folder, is_on_hub) == (ModelConfig.load(model).folder, False)


def test_a_name_that_no_file_has_is_refused_with_those_that_are_there(repository: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"'someone/tiny-GGUF:Q5_K_M' names none.*tiny-Q4_K_M\.gguf, tiny\.q8_0"):
        ModelConfig.load("someone/tiny-GGUF:Q5_K_M")
    with pytest.raises(ModelNotFound, match=r"'someone/tiny-GGUF:K_M' names none"):
        ModelConfig.load("someone/tiny-GGUF:K_M")


def test_a_repository_that_is_not_in_the_cache_is_refused_offline(repository: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"someone/other"):
        ModelConfig.load("someone/other:Q4_K_M")


def write_encoder(folder: Path) -> Path:
    """An mmproj file, as llama.cpp names it."""
    path = folder / "mmproj-tiny-Q8_0.gguf"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((2, 32), dtype=np.float32))
    finish(writer)
    return path


def test_the_encoder_of_a_multimodal_model_is_not_taken_for_its_language_model(
    repository: Path, tmp_path: Path
) -> None:
    write_encoder(repository)
    assert ModelConfig.load("someone/tiny-GGUF:Q8_0").architecture == "Qwen3ForCausalLM"
    folder = tmp_path / "model"
    folder.mkdir()
    write_gguf(tiny_model("llama"), "llama", folder / "tiny.gguf")
    encoder = write_encoder(folder)
    assert ModelConfig.load(str(folder)).architecture == "LlamaForCausalLM"
    with pytest.raises(UnsupportedModel, match=r"mmproj-tiny-Q8_0\.gguf has the encoder .* Give the GGUF file of its"):
        ModelConfig.load(str(encoder))
