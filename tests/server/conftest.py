"""One server of the demo model per module, and the offline API as its oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from penstock import LLM
from penstock.engine.async_engine import AsyncEngine
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
