"""Answers whose markers are special tokens, which detokenisation skips, in every chat API: streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from support.answers import function
from support.fake_engine import FakeCore, scripted
from support.harmony import RETURN, VOCAB_SIZE, encode, write_harmony_model
from support.servers import Served, events_of, serving

HM = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
TOOL = function("f", {"type": "object"})
HARMONY = {"reasoning_parser": "openai_gptoss", "tool_call_parser": "openai", "enable_auto_tool_choice": True}


class Read(NamedTuple):
    """What a client gets of an answer."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]


@pytest.fixture(scope="module")
def core() -> FakeCore:
    core = FakeCore()
    core.max_model_len, core.vocab_size = 1024, VOCAB_SIZE
    return core


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_harmony_model(tmp_path_factory.mktemp("model"), with_weights=False))


@pytest.fixture(scope="module")
def server(core: FakeCore, folder: str) -> Iterator[Served]:
    engine = AsyncEngine.from_config(EngineConfig.create(folder), load_core=lambda _: core)
    with serving(engine, **HARMONY) as served:
        yield served


def chat(server: Served, *, stream: bool, **fields: Any) -> Read:
    body = {"messages": [{"role": "user", "content": "Who?"}], "stream": stream, **fields}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    if not stream:
        message = reply.json["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        return Read(message.get("reasoning") or "", message["content"] or "", calls)
    deltas = [json.loads(data)["choices"] for data in events_of(reply.body) if data != "[DONE]"]
    deltas = [choice["delta"] for choices in deltas for choice in choices]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    name, arguments = ("".join(call.get(key) or "" for call in calls) for key in ("name", "arguments"))
    read = ("".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning", "content"))
    return Read(*read, [(name, arguments)] if calls else [])


def respond(server: Served, *, stream: bool, **fields: Any) -> Read:
    fields = {**fields, "tools": [{"type": "function", **tool["function"]} for tool in fields.get("tools", [])]}
    reply = server.post("/v1/responses", {"input": "Who?", "stream": stream, **fields})
    assert reply.status == 200, reply.body
    response = json.loads(events_of(reply.body)[-1])["response"] if stream else reply.json
    items = response["output"]
    return Read(
        "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]),
        "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
        [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"],
    )


def message(server: Served, *, stream: bool, **fields: Any) -> Read:
    tools = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in fields.pop("tools", [])]
    body = {"max_tokens": 200, "messages": [{"role": "user", "content": "Who?"}], "stream": stream, **fields}
    reply = server.post("/v1/messages", {**body, **({"tools": tools} if tools else {})})
    assert reply.status == 200, reply.body
    if not stream:
        blocks = reply.json["content"]
        return Read(
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"],
        )
    events = [json.loads(data) for data in events_of(reply.body)]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    read = ("".join(delta.get(key, "") for delta in deltas) for key in ("thinking", "text", "partial_json"))
    reasoning, content, arguments = read
    return Read(reasoning, content, [(block["name"], arguments) for block in starts if block["type"] == "tool_use"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [chat, respond, message])
@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (f"{HM}<|channel|>final<|message|>Yes.", {}, Read("Hm.", "Yes.", [])),
        (f"{HM}<|channel|>final <|constrain|>json<|message|>Yes.", {}, Read("Hm.", "Yes.", [])),
        ("Yes.", {}, Read("", "Yes.", [])),
        (f"{HM}<|channel|>final<|message|>Yes.", {"tools": [TOOL]}, Read("Hm.", "Yes.", [])),
        (HM + CALL, {"tools": [TOOL]}, Read("Hm.", "", [("f", '{"a": 1}')])),
        (HM + CALL, {}, Read('Hm.{"a": 1}', "", [])),
    ],
    ids=["final", "final with a type", "bare", "final beside tools", "call", "call of no tool"],
)
def test_harmony_is_read_with_tools_and_without(
    server: Served, core: FakeCore, ask: Any, text: str, fields: dict[str, Any], expected: Read, stream: bool
) -> None:
    core.tokens = scripted(*encode(text), RETURN)
    assert ask(server, stream=stream, **fields) == expected


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("start", "end"),
    [("<|user|>thought\n", "<|user|>answer\n"), ("<|user|>", "<|system|>"), ("think:", "<|user|>")],
    ids=["special and text", "special", "one special"],
)
def test_custom_markers_may_have_special_tokens(
    core: FakeCore, folder: str, start: str, end: str, stream: bool
) -> None:
    engine = AsyncEngine.from_config(EngineConfig.create(folder), load_core=lambda _: core)
    core.tokens = scripted(*encode(f"{start}Hm.{end}Yes."), RETURN)
    options = {"reasoning_parser": "custom", "reasoning_start_str": start, "reasoning_end_str": end}
    with serving(engine, **options) as served:
        assert chat(served, stream=stream) == Read("Hm.", "Yes.", [])
