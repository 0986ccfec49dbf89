"""Parameters for a KV connector over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.inputs.prompts import PromptDict
from support.servers import Served, events_of, serving

OPTIONS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 16}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
GENERATE = "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ROMEO:", "max_tokens": 2, "kv_transfer_params": {"peer": "a"}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "kv_transfer_params": {"peer": "a"},
    },
    GENERATE: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}, "kv_transfer_params": {"peer": "a"}},
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


@pytest.fixture(scope="module")
def connected() -> Iterator[Served]:
    engine = AsyncEngine("demo", enable_multiprocessing=False, kv_transfer_config=CONFIG, **OPTIONS)
    with serving(engine) as served:
        yield served


@pytest.mark.parametrize("path", BODIES)
def test_a_response_has_what_the_connector_returns(connected: Served, path: str) -> None:
    reply = connected.post(path, BODIES[path])
    assert reply.status == 200, reply.json
    assert reply.json["kv_transfer_params"]["given"] == {"peer": "a"}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", BODIES)
def test_the_chunk_that_ends_a_choice_has_what_the_connector_returns(connected: Served, path: str, n: int) -> None:
    body = {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}}
    if path == GENERATE:
        body["sampling_params"] = {**body["sampling_params"], "n": n}
    else:
        body["n"] = n
    reply = connected.post(path, body)
    assert reply.status == 200, reply.body
    *chunks, usage, done = events_of(reply.body)
    assert done == "[DONE]"
    assert "kv_transfer_params" not in json.loads(usage)
    ends = 0
    for chunk in map(json.loads, chunks):
        (choice,) = chunk["choices"]
        ends += choice["finish_reason"] is not None
        assert ("kv_transfer_params" in chunk) == (choice["finish_reason"] is not None)
        assert chunk.get("kv_transfer_params", {}).get("given") in (None, {"peer": "a"})
    assert ends == n


def test_a_rendered_request_has_the_parameters(connected: Served) -> None:
    body = BODIES["/v1/completions"]
    (rendered,) = connected.post("/v1/completions/render", body).json
    assert rendered["kv_transfer_params"] == {"peer": "a"}
    reply = connected.post(GENERATE, rendered)
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
