"""Prompts of embeddings over `/v1/completions`: answers are those of the offline API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from support.checkpoints import tiny_checkpoint
from support.multimodal_models import save_tokenizer, saved_tensor, words
from support.servers import Served, serving

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "kv_cache_memory_bytes": "8MiB",
    "enable_prompt_embeds": True,
}
ROWS = [torch.randn(length, 64, generator=torch.Generator().manual_seed(length)) for length in (5, 20)]
SAVED = [saved_tensor(rows) for rows in ROWS]
FIELDS: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, "gpt2")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    config = EngineConfig.create(str(folder), **OPTIONS)
    with serving(AsyncEngine.from_config(config), served_model_name=("tiny",)) as served:
        yield served


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Texts of the two prompts of embeddings, and of a text."""
    prompts: list[Any] = [*({"prompt_embeds": rows} for rows in ROWS), words(7, 8, 9)]
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_one_prompt_of_embeddings(server: Served, expected: list[str]) -> None:
    for prompt in ({}, {"prompt": None}, {"prompt": ""}, {"prompt": []}):
        reply = server.post("/v1/completions", {**FIELDS, **prompt, "prompt_embeds": SAVED[1]})
        assert [choice["text"] for choice in reply.json["choices"]] == [expected[1]]
        assert reply.json["usage"]["prompt_tokens"] == 20


def test_prompts_of_embeddings_come_before_those_of_text(server: Served, expected: list[str]) -> None:
    reply = server.post("/v1/completions", {**FIELDS, "prompt": words(7, 8, 9), "prompt_embeds": SAVED})
    assert [choice["text"] for choice in reply.json["choices"]] == expected
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt_embeds": saved_tensor(torch.zeros(4, 48))}, "prompt_embeds", "has the shape [4, 48]"),
    ({"prompt_embeds": [SAVED[0], "AAAA"]}, "prompt_embeds[1]", "not a zip archive"),
    ({"prompt_embeds": SAVED[0], "prompt_logprobs": 1}, "prompt_logprobs", "not for prompts of embeddings"),
    ({"prompt_embeds": saved_tensor(torch.zeros(70, 64))}, "prompt_embeds", "1 to 64 rows"),
    ({"prompt_embeds": saved_tensor(torch.full((4, 64), 3e38))}, "prompt_embeds", "values that are too large"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_bad_embeddings_are_refused_by_field(server: Served, fields: dict[str, Any], param: str, message: str) -> None:
    reply = server.post("/v1/completions", {**FIELDS, **fields})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert message in reply.error["message"]
