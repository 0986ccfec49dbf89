"""Embeddings of images and texts equal those of Transformers' CLIP and SigLIP in float32, normalised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from penstock import LLM
from penstock.errors import InvalidRequest
from support.checkpoints import VOCAB_SIZE, save_checkpoint
from support.multimodal_models import picture, save_tokenizer, words
from support.transformers_models import randomise

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 80,
    "pad_token_id": 3,
}
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_SQUARE = {"height": 16, "width": 16}
# By model type: fields of the text's side, of the image's, others, and the image processor.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clip": (
        {},
        {},
        {"projection_dim": 40},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": _SQUARE},
    ),
    "siglip": (
        {"projection_size": 48},
        {},
        {},
        {"image_processor_type": "SiglipImageProcessor", "size": _SQUARE},
    ),
}
TEXTS = [words(5, 6, 7, 80), words(10, 80), words(*range(20, 38), 80)]
IMAGES = [picture(40, 24, 1), picture(16, 48, 2)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    of_text, of_vision, others, processor = FAMILIES[request.param]
    config = transformers.AutoConfig.for_model(
        request.param, text_config={**_TEXT, **of_text}, vision_config={**_VISION, **of_vision}, **others
    )
    made = randomise(transformers.AutoModel.from_config(config))
    save_checkpoint(made, folder)
    save_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return made, folder


def of_texts(model: Any) -> list[Tensor]:
    rows = []
    for text in TEXTS:
        ids = [int(word[1:]) for word in text.split()]
        if model.config.model_type == "siglip":
            ids += [3] * (24 - len(ids))
        output = model.get_text_features(input_ids=torch.tensor([ids]))
        rows.append(F.normalize(getattr(output, "pooler_output", output)[0], dim=-1))
    return rows


def of_images(model: Any, folder: Path) -> list[Tensor]:
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    output = model.get_image_features(**processor(images=IMAGES, return_tensors="pt"))
    return list(F.normalize(getattr(output, "pooler_output", output), dim=-1))


def test_embeddings_equal_those_of_transformers(model: tuple[Any, Path]) -> None:
    oracle, folder = model
    with torch.no_grad():
        expected = [*of_texts(oracle), *of_images(oracle, folder)]
    images: list[Any] = [{"multi_modal_data": {"image": image}} for image in IMAGES]
    prompts: list[Any] = [*TEXTS, *images]
    with LLM(str(folder), dtype="float32") as llm:
        together = [torch.tensor(output.outputs.embedding) for output in llm.embed(prompts, use_tqdm=False)]
        alone = [torch.tensor(llm.embed([one], use_tqdm=False)[0].outputs.embedding) for one in reversed(prompts)]
        with pytest.raises(InvalidRequest, match="an image and a text"):
            llm.embed({**images[0], "prompt": "w5"}, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="2 items of image"):
            llm.embed({"multi_modal_data": {"image": IMAGES}}, use_tqdm=False)
    for row, one, other in zip(expected, together, reversed(alone), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, row, atol=1e-5, rtol=1e-5)
