"""Parameters for a KV connector over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.inputs.prompts import PromptDict
from support.servers import Served, serving

OPTIONS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 16}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ROMEO:", "max_tokens": 2, "kv_transfer_params": {"peer": "a"}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "kv_transfer_params": {"peer": "a"},
    },
}
CONFIG = {
    "kv_connector": "MemoryConnector",
    "kv_connector_module_path": "features.kv_connector.memory_connector",
    "kv_role": "kv_both",
}


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_without_a_connector_refuses_them(server: Served, path: str) -> None:
    reply = server.post(path, BODIES[path])
    assert reply.status == 400
    assert "Start the engine with kv_transfer_config" in reply.json["error"]["message"]


def test_a_response_has_what_the_connector_returns() -> None:
    engine = AsyncEngine("demo", enable_multiprocessing=False, kv_transfer_config=CONFIG, **OPTIONS)
    with serving(engine) as served:
        for path, body in BODIES.items():
            reply = served.post(path, body)
            assert reply.status == 200, reply.json
            assert reply.json["kv_transfer_params"]["given"] == {"peer": "a"}


def test_outputs_have_what_the_connector_returns_and_loads_outlive_a_sleep() -> None:
    prompt: PromptDict = {
        "prompt": "ROMEO:\n" + "It is the east. " * 20,
        "parts": {"kv_transfer": {"params": {"peer": "a"}}},
    }
    with LLM("demo", kv_transfer_config=CONFIG, **OPTIONS) as llm:
        first = llm.generate(prompt, PARAMS, use_tqdm=False)[0]
        assert first.kv_transfer_params == {"finish_reason": "length", "given": {"peer": "a"}}
        llm.sleep(level=1)
        llm.wake_up()
        again = llm.generate(prompt, PARAMS, use_tqdm=False)[0]
        assert again.num_cached_tokens > first.num_cached_tokens
        assert llm.reset_prefix_cache(reset_connector=True)
        assert llm.generate(prompt, PARAMS, use_tqdm=False)[0].num_cached_tokens == 0
