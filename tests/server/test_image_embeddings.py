"""Embeddings of images and texts over `/v1/embeddings`: those of the offline API."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from penstock import LLM
from penstock.engine.async_engine import AsyncEngine
from support.checkpoints import VOCAB_SIZE, save_checkpoint
from support.multimodal_models import picture, save_tokenizer, words
from support.servers import Served, serving
from support.transformers_models import randomise

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT = {**_SIZES, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 80}
_IMAGES = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
IMAGE = picture(40, 24, 1)
TEXT = words(5, 6, 80)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    config = transformers.CLIPConfig(
        text_config=_TEXT, vision_config={**_SIZES, "patch_size": 4, "image_size": 16}, projection_dim=24
    )
    save_checkpoint(randomise(transformers.CLIPModel(config)), folder)
    save_tokenizer(folder)
    processor = {"image_processor_type": "CLIPImageProcessor", **_IMAGES}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(AsyncEngine(folder, dtype="float32"), served_model_name=("clip",)) as served:
        yield served


def url() -> str:
    file = io.BytesIO()
    IMAGE.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


IMAGE_PART = {"type": "image_url", "image_url": {"url": url()}}


def body(*content: Any) -> dict[str, Any]:
    return {"model": "clip", "messages": [{"role": "user", "content": list(content)}]}


def test_messages_are_embedded_as_by_the_offline_api(server: Served, folder: Path) -> None:
    with LLM(str(folder), dtype="float32") as llm:
        prompts: list[Any] = [{"multi_modal_data": {"image": IMAGE}}, TEXT]
        expected = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    asked = [body(IMAGE_PART), body({"type": "text", "text": TEXT}), {"model": "clip", "input": TEXT}]
    found = []
    for one in asked:
        reply = server.post("/v1/embeddings", one)
        assert reply.status == 200, reply.body
        found.append(reply.json["data"][0]["embedding"])
    np.testing.assert_allclose(found, [*expected, expected[1]], atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({}, "input", "Give one of input and messages"),
        ({**body(IMAGE_PART), "input": "a"}, "input", "beside messages"),
        (body(IMAGE_PART, {"type": "text", "text": TEXT}), None, "an image and a text"),
        (body(IMAGE_PART, IMAGE_PART), None, "2 items of image"),
        (body({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}), None, "is audio"),
    ],
)
def test_what_is_not_one_item_is_refused(server: Served, fields: Any, param: str | None, said: str) -> None:
    reply = server.post("/v1/embeddings", {"model": "clip", **fields})
    assert reply.status == 400, reply.body
    assert said in reply.error["message"]
    assert param is None or reply.error["param"] == param
