"""Images of pages and queries are embedded per token as by Transformers' ColPali and ColQwen2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from penstock import LLM
from penstock.errors import InvalidRequest
from penstock.media.processors.reading import read_processor
from support.multimodal_models import IMAGE, PROCESSORS, picture, save_tokenizer, tiny_multimodal_model, words
from support.transformers_models import TINY, randomise

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128}


def save_colqwen2(folder: Path) -> PreTrainedModel:
    vlm = tiny_multimodal_model("qwen2-vl").config
    config = transformers.ColQwen2Config(vlm_config=vlm.to_dict(), embedding_dim=16)
    files = PROCESSORS["qwen2-vl"]
    return _save(
        folder,
        transformers.ColQwen2ForRetrieval,
        config,
        files["preprocessor_config"],
        {
            "visual_prompt_prefix": f"{words(5)} <vision_start> <image> <vision_end> {words(6)}",
            "query_prefix": f"{words(8)} ",
        },
    )


def save_colpali(folder: Path) -> PreTrainedModel:
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16,
        "vision_use_head": False,
        "projection_dim": 64,
    }
    text = {**TINY, "head_dim": 16, "model_type": "gemma"}
    vlm = transformers.AutoConfig.for_model(
        "paligemma", text_config=text, vision_config=vision, projection_dim=64, image_token_index=IMAGE
    )
    config = transformers.ColPaliConfig(vlm_config=vlm.to_dict(), embedding_dim=16)
    images = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 16, "width": 16},
        "image_seq_length": 16,
    }
    return _save(
        folder,
        transformers.ColPaliForRetrieval,
        config,
        images,
        {
            "visual_prompt_prefix": words(5, 6),
            "query_prefix": f"{words(8)} ",
        },
    )


def _save(folder: Path, model_class: Any, config: Any, images: dict[str, Any], processor: dict[str, Any]) -> Any:
    config._attn_implementation = "eager"
    model = randomise(model_class(config))
    model.save_pretrained(folder)
    tokenizer = save_tokenizer(folder)
    tokenizer.pad_token, tokenizer.bos_token = "w0", "w1"
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return model


MODELS = {"colqwen2": save_colqwen2, "colpali": save_colpali}


@pytest.mark.parametrize("name", MODELS)
def test_images_and_texts_are_embedded_as_by_transformers(name: str, tmp_path: Path) -> None:
    model, processor = MODELS[name](tmp_path), read_processor(tmp_path, name)
    text = f"{words(*range(10, 17))}"
    image = picture(24, 16, 1)
    with LLM(tmp_path, **OPTIONS) as llm:
        outputs = llm.encode([{"multi_modal_data": {"image": image}}, text], pooling_task="token_embed", use_tqdm=False)
        with pytest.raises(InvalidRequest, match="embeds one of them"):
            llm.encode([{"prompt": text, "multi_modal_data": {"image": image}}], pooling_task="token_embed")
    given = [processor(images=[image], return_tensors="pt"), processor.tokenizer([text], return_tensors="pt")]
    for output, inputs in zip(outputs, given, strict=True):
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            wanted = model(**inputs).embeddings[0]
        torch.testing.assert_close(torch.as_tensor(output.outputs.data), wanted, rtol=1e-4, atol=1e-4)
