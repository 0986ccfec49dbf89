"""Features in place of images: answers are those of the images that an encoder makes them of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import LLM, RequestOutput, SamplingParams
from penstock.contract import Parts
from penstock.contract.array_bytes import ArrayBytes
from penstock.errors import InvalidRequest, UnsupportedParameter
from penstock.features.multimodal.messages import MediaItem, MediaPart, Run
from penstock.media.item import FEATURES
from penstock.media.processors.reading import read_processor
from support.multimodal_models import PLACEHOLDERS, picture, save_multimodal, saved_tensor, words

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128, "enable_mm_embeds": True}
IMAGES = [picture(40, 24, 1), picture(16, 48, 2)]
NAMES = ["qwen2.5-vl", "qwen3-vl", "llava", "gemma3"]


def features_by_transformers(name: str, folder: Path, model: Any) -> tuple[list[Tensor], Tensor | None]:
    """Features of each image, and the grids of all."""
    processor = read_processor(folder, name.replace("-", "_").replace(".", "_"))
    inputs = processor.image_processor(images=IMAGES, return_tensors="pt")
    with torch.no_grad():
        output = model.get_image_features(**inputs)
    features = getattr(output, "pooler_output", output)
    levels = getattr(output, "deepstack_features", None)
    if levels:
        counts = [len(one) for one in features]
        whole = [torch.cat(list(one)) if isinstance(one, (list, tuple)) else one for one in (features, *levels)]
        features = torch.cat(whole, dim=1).split(counts)
    return [one.reshape(-1, one.shape[-1]) for one in features], inputs.get("image_grid_thw")


def answers(llm: LLM, prompts: list[Any]) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_those_of_the_images(name: str, tmp_path: Path) -> None:
    model = save_multimodal(tmp_path, name)
    features, grids = features_by_transformers(name, tmp_path, model)
    image = PLACEHOLDERS.get(name, "<image>")
    text = f"{words(5, 6)} {image} {words(7)} {image} {words(8, 9)}"
    given: list[Any] = [features]
    if grids is not None:
        objects = [{"image_embeds": one, "image_grid_thw": grid} for one, grid in zip(features, grids, strict=True)]
        saved = {"image_embeds": saved_tensor(torch.cat(features)), "image_grid_thw": saved_tensor(grids)}
        given = [objects, {"image_embeds": torch.cat(features), "image_grid_thw": grids}, saved]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        prompts = [{"prompt": text, "multi_modal_data": {"image": items}} for items in (IMAGES, *given)]
        expected, *outputs = answers(llm, prompts)
    for output in outputs:
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        for one, other in zip(output.outputs[0].logprobs or (), expected.outputs[0].logprobs or (), strict=True):
            assert all(abs(one[token].logprob - other[token].logprob) < 1e-4 for token in one)


@pytest.mark.one_path(reason="nothing runs")
@pytest.mark.parametrize(("modality", "name"), [("embeddings", "prompt_embeds"), ("image", "image_embeds")])
def test_given_rows_are_named_where_logits_are_not_finite(modality: str, name: str) -> None:
    rows = ArrayBytes.of(np.ones((1, 4), np.float32))
    items = [
        MediaItem(modality=kind, runs=(Run(start=start, length=1),), key=str(start), inputs={field: rows})
        for start, (kind, field) in enumerate([("image", "pixel_values"), (modality, FEATURES)])
    ]
    assert Parts.of([MediaPart(items=items)]).given_values == name
    assert Parts.of([MediaPart(items=items[:1])]).given_values is None


@pytest.mark.one_path(reason="nothing runs")
def test_features_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "qwen2.5-vl")
    grid = torch.tensor([[1, 4, 4]])
    refused: list[tuple[Any, str]] = [
        (torch.zeros(4, 48), "image_embeds has 48 columns. Allowed: 64"),
        (torch.zeros(4, 64), "image_embeds has 4 rows, and image_grid_thw is None"),
        ({"image_embeds": torch.zeros(3, 64), "image_grid_thw": grid}, "3 rows, which do not fit"),
        ({"image_embeds": torch.zeros(4, 64), "image_grid_thw": [[1, 4]]}, "time, height and width"),
        ({"image_embeds": torch.zeros(4, 64), "image_grid_thw": [[1, 1, 16]]}, "the latter two multiples of 2"),
        ({"image_embeds": torch.zeros(4, 64), "other": 1}, "field 'other'"),
    ]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        for item, message in refused:
            prompt: Any = {"prompt": PLACEHOLDERS["qwen2.5-vl"], "multi_modal_data": {"image": item}}
            with pytest.raises(InvalidRequest, match=message):
                answers(llm, [prompt])
    with LLM(str(tmp_path), **{**OPTIONS, "enable_mm_embeds": False}) as llm:
        prompt = {"prompt": "<image>", "multi_modal_data": {"image": {"image_embeds": torch.zeros(4, 64)}}}
        with pytest.raises(UnsupportedParameter, match="enable_mm_embeds=True"):
            answers(llm, [prompt])
