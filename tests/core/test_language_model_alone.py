"""The language model of a multimodal checkpoint answers texts as Transformers' multimodal model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.checkpoints import VOCAB_SIZE, save_checkpoint
from support.engines import assert_greedy_continuation, greedy, make_core, random_prompts, run
from support.multimodal_models import FAMILIES, tiny_multimodal_model

PROMPTS = random_prompts((5, 37, 1, 22), VOCAB_SIZE - 8, seed=3)


def assert_answered(folder: Path, model: Any) -> None:
    core = make_core(folder, dtype="float32", block_size=4, max_num_batched_tokens=16)
    results = run(core, PROMPTS, greedy(8, logprobs=2))
    core.close()
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_greedy_continuation(model, prompt, result)


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_answered_as_by_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_multimodal_model(name)
    save_checkpoint(model, tmp_path)
    # Llama 4's own class fails for texts alone in some versions of Transformers.
    assert_answered(tmp_path, model.language_model if name == "llama4" else model)


def rename(folder: Path, names: dict[str, str]) -> None:
    """Rename the tensors of a checkpoint by their beginnings, as other versions of Transformers wrote them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)

    def other(name: str) -> str:
        old = next((old for old in names if name.startswith(old)), "")
        return names[old] + name.removeprefix(old) if old else name

    save_file({other(name): tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("llava", {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}),
        ("qwen2.5-vl", {"model.language_model.": "model.", "model.visual.": "visual."}),
    ],
)
def test_other_names_of_tensors_are_read(name: str, names: dict[str, str], tmp_path: Path) -> None:
    model = tiny_multimodal_model(name)
    save_checkpoint(model, tmp_path)
    rename(tmp_path, names)
    assert_answered(tmp_path, model)


def test_a_configuration_whose_text_fields_are_not_apart_is_read(tmp_path: Path) -> None:
    model = tiny_multimodal_model("qwen2.5-vl")
    save_checkpoint(model, tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    text = content.pop("text_config")
    rope = text.pop("rope_parameters")
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    path.write_text(json.dumps({**text, **old, **content}))
    assert_answered(tmp_path, model)


def test_language_models_of_transformers_run_too(tmp_path: Path) -> None:
    model = tiny_multimodal_model("llava", model_type="stablelm", partial_rotary_factor=0.5)
    save_checkpoint(model, tmp_path)
    assert_answered(tmp_path, model)
