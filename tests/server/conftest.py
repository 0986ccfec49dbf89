"""One server of the demo model per module, and the offline API as its oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from penstock import LLM
from penstock.engine.async_engine import AsyncEngine
from support.pooling_models import TINY_ENCODER, random_model, sentence_transformer
from support.servers import Served, serving

DEMO = {"num_threads": 1, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = AsyncEngine("demo", enable_multiprocessing=False, policy="priority", **DEMO)
    with serving(engine, served_model_name=("demo", "other-name"), trust_request_chat_template=True) as served:
        yield served


@pytest.fixture
def client(server: Served) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **DEMO) as llm:
        yield llm


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    """A server of a small model that embeds, and sentence-transformers' model of the same weights."""
    folder = tmp_path_factory.mktemp("embedder")
    oracle = sentence_transformer(folder, random_model("BertModel", "BertConfig", **TINY_ENCODER))
    with serving(AsyncEngine(folder / "model")) as served:
        yield served, oracle
