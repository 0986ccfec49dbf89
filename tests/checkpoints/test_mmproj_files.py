"""Encoders of images in GGUF files: where they are found, which model they fit, how images are processed for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import ModelConfig
from penstock.errors import ModelNotFound, UnsupportedModel
from penstock.media.processors.reading import read_processor
from support.checkpoints import save_checkpoint, tiny_model
from support.gguf_files import write_gguf
from support.mmproj_files import KINDS, write_encoder, write_files, write_language_model
from support.multimodal_models import MODEL_TYPES, PROCESSORS, picture, save_tokenizer, tiny_multimodal_model

_STATISTICS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    """Folder of both files of a model."""
    folder = tmp_path / "llava"
    folder.mkdir()
    write_files(folder, "llava")
    return folder


def architecture_of(model: Path, **options: Any) -> str | None:
    multimodal = ModelConfig.load(model, **options).multimodal
    return None if multimodal is None else multimodal.architecture


def test_an_encoder_beside_the_model_is_found_by_its_name(llava: Path) -> None:
    assert architecture_of(llava) == architecture_of(llava / "llava-Q8_0.gguf") == "LlavaForConditionalGeneration"
    (llava / "mmproj-llava-f16.gguf").rename(llava / "encoder.gguf")
    assert architecture_of(llava / "llava-Q8_0.gguf") is None
    assert architecture_of(llava / "llava-Q8_0.gguf", mmproj=str(llava / "encoder.gguf")) is not None


def test_the_largest_of_several_encoders_is_taken(llava: Path) -> None:
    (llava / "mmproj-Q4_0.gguf").write_bytes(b"GGUF, but cut off")
    assert architecture_of(llava) == "LlavaForConditionalGeneration"


def test_an_encoder_of_another_model_is_left_alone_unless_it_is_given(llava: Path) -> None:
    path = write_gguf(tiny_model("llama", hidden_size=48), "llama", llava / "other.gguf")
    assert architecture_of(path) is None
    with pytest.raises(UnsupportedModel, match=r"mmproj-llava-f16.gguf makes features of 64 values, and .* takes 48"):
        ModelConfig.load(path, mmproj=llava / "mmproj-llava-f16.gguf")
    with pytest.raises(UnsupportedModel, match=r"general.architecture='llama'. It must be 'clip'"):
        ModelConfig.load(path, mmproj=path)
    gemma = write_encoder(tiny_multimodal_model("gemma3"), "gemma3", llava / "mmproj-gemma.gguf")
    with pytest.raises(UnsupportedModel, match=r"for language models of the architecture gemma3, and .*'llama'"):
        ModelConfig.load(llava / "llava-Q8_0.gguf", mmproj=gemma)


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [
        (
            "resampler",
            UnsupportedModel,
            "'resampler', which does not run here. Supported: gemma3, idefics3, mlp, ",
        ),
        ("pixtral", UnsupportedModel, r"has no token \[IMG\]"),
        ("idefics3", UnsupportedModel, "has no token <global-img>"),
    ],
)
def test_another_kind_of_projector_is_refused_by_name_where_it_is_given(
    kind: str, error: type[Exception], reason: str, tmp_path: Path
) -> None:
    model = tiny_multimodal_model("llava")
    path = write_language_model(model, "llava", tmp_path / "model.gguf")
    encoder = write_encoder(model, "llava", tmp_path / "mmproj.gguf", **{"clip.projector_type": kind})
    assert architecture_of(path) is None
    with pytest.raises(error, match=reason):
        ModelConfig.load(path, mmproj=encoder)


def test_a_file_that_is_not_there_and_a_model_of_other_files_are_refused(llava: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"mmproj='nowhere.gguf' is not there"):
        ModelConfig.load(llava, mmproj="nowhere.gguf")
    save_checkpoint(tiny_model("llama"), tmp_path / "model")
    with pytest.raises(ModelNotFound, match=r"mmproj=.* is not valid for model=.*, which is no GGUF file"):
        ModelConfig.load(tmp_path / "model", mmproj=llava / "mmproj-llava-f16.gguf")


@pytest.mark.parametrize("name", [name for name in KINDS if name in PROCESSORS])
def test_images_are_processed_as_for_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    write_files(tmp_path, name)
    config = ModelConfig.load(tmp_path)
    original = tmp_path / "original"
    original.mkdir()
    save_tokenizer(original)
    for file, content in PROCESSORS[name].items():
        statistics = _STATISTICS if file == "preprocessor_config" else {}
        (original / f"{file}.json").write_text(json.dumps({**content, **statistics}))
    made, expected = (read_processor(folder, MODEL_TYPES[name]) for folder in (config.folder, original))
    for image in (picture(40, 24, 1), picture(16, 48, 2)):
        pixels, wanted = (one.image_processor([image], return_tensors="np") for one in (made, expected))
        assert pixels.keys() == wanted.keys()
        for key, values in wanted.items():
            np.testing.assert_array_equal(np.asarray(pixels[key]), np.asarray(values))
