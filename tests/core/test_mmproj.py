"""Answers to prompts with images of models of GGUF files equal those of the model that the files were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from penstock import LLM
from penstock.config import ModelConfig
from penstock.media.processors.reading import read_processor
from support.mmproj_files import KINDS, PLACEHOLDERS, words, write_encoder, write_files, write_language_model
from support.multimodal_answers import NUM_TOKENS, TOLERANCE, answer, assert_answered_as_by
from support.multimodal_models import picture, tiny_multimodal_model

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128, "quantization": "none"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def prompts_of(name: str) -> list[tuple[str, dict[str, list[Any]]]]:
    image = PLACEHOLDERS.get(name, "<image>")
    return [
        (f"{words(5, 6)}{image}{words(7, 8)}", {"image": [picture(40, 24, 1)]}),
        (words(*range(10, 21)), {}),
        (f"{image}{words(11)}{image}{words(12, 13)}", {"image": [picture(16, 48, 2), picture(33, 31, 3)]}),
    ]


def assert_answers(path: Path, name: str, model: Any, mmproj: Path | None = None) -> None:
    config = ModelConfig.load(path, mmproj=mmproj)
    assert config.multimodal is not None
    processor = read_processor(config.folder, str(config.multimodal.hf_config["model_type"]))
    with LLM(path, **OPTIONS, mmproj=mmproj) as llm:
        for prompt in prompts_of(name):
            assert_answered_as_by(model, processor, *prompt, answer(llm, [prompt])[0])


@pytest.mark.each_value_quick
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_projector_answers_as_its_model(name: str, tmp_path: Path) -> None:
    model = write_files(tmp_path, name)
    assert_answers(tmp_path / f"{name}-Q8_0.gguf", name, model)


def test_the_language_model_of_qwen_vl_takes_text_alone(tmp_path: Path) -> None:
    model = tiny_multimodal_model("qwen2-vl")
    path = write_language_model(model, "qwen2-vl", tmp_path / "model.gguf")
    text = words(*range(10, 21))
    with LLM(path, **OPTIONS) as llm:
        assert_answered_as_by(model, llm.get_tokenizer(), text, {}, answer(llm, [(text, {})])[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-vl", "llava", "mistral3"])
def test_quantised_files_answer_as_their_dequantised_model(name: str, tmp_path: Path) -> None:
    model = write_files(tmp_path, name, model=Type.Q8_0, encoder=Type.Q4_0, intermediate_size=128)
    assert_answers(tmp_path / f"{name}-Q8_0.gguf", name, model)
    # Products of the blocks round activations to 8 bits.
    with LLM(tmp_path, **{**OPTIONS, "quantization": None}) as llm:
        outputs = answer(llm, prompts_of(name))
    assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)


@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3"])
def test_matrices_may_have_each_others_names_as_in_old_files(name: str, tmp_path: Path) -> None:
    model = tiny_multimodal_model(name)
    encoder = write_encoder(model, name, tmp_path / "mmproj.gguf", old_names=True)
    path = write_language_model(model, name, tmp_path / "model.gguf")
    assert_answers(path, name, model, mmproj=encoder)


def test_tokens_of_an_image_may_be_any_others_in_llava(tmp_path: Path) -> None:
    model = tiny_multimodal_model("llava")
    changes = {"tokenizer.ggml.unknown_token_id": 4}
    write_language_model(model, "llava", tmp_path / "model.gguf", named={}, **changes)
    write_encoder(model, "llava", tmp_path / "mmproj.gguf")
    with LLM(tmp_path, **OPTIONS) as llm:
        (output,) = answer(llm, [(f"{words(5, 6)}<w4>{words(7)}", {"image": [picture(40, 24, 1)]})])
    assert list(output.prompt_token_ids or ()) == [5, 6, *[4] * 16, 7]
    folder = ModelConfig.load(tmp_path).folder
    row = torch.log_softmax(logits_with(model, output.prompt_token_ids, picture(40, 24, 1), folder), -1)
    for token_id, value in output.outputs[0].logprobs[0].items():
        assert abs(float(row[token_id]) - value.logprob) <= TOLERANCE


def logits_with(model: Any, token_ids: Any, image: Any, folder: Path) -> torch.Tensor:
    """Logits after a prompt whose tokens of id 4 are an image."""
    processor = read_processor(folder, "llava")
    pixels = processor.image_processor(images=[image], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        features = model.model.get_image_features(pixels).pooler_output[0]
        ids = torch.tensor([list(token_ids)])
        rows = model.get_input_embeddings()(ids).clone()
        rows[0, ids[0] == 4] = features
        return model(inputs_embeds=rows).logits[0, -1]
