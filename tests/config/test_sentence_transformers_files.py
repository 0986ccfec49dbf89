"""Files of sentence-transformers that say what cannot be are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.sentence_transformers import SentenceTransformersFiles
from penstock.errors import ModelError


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", [], "modules.json is not a list of modules"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "q: "}, "default_prompt_name": "passage"},
            r"default_prompt_name='passage', which is none of its prompts: query",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": ["query"]}, "it has none"),
    ],
)
def test_damaged_files_are_refused(file: str, content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}]))
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        SentenceTransformersFiles.read(tmp_path)


@pytest.mark.parametrize("place", ["../other", "1_Pooling/../../other", "/etc", ".."])
def test_modules_outside_of_the_models_folder_are_refused(place: str, tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": place}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"modules\.json has the path .* which is not in the model's folder"):
        SentenceTransformersFiles.read(tmp_path)


def test_a_default_prompt_that_every_model_has_is_empty(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}]))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "document"}))
    files = SentenceTransformersFiles.read(tmp_path)
    assert files is not None
    assert files.default_prompt_name is None
