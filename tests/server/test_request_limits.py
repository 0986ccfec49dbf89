"""Limits of requests over HTTP: each field is refused by name for a size beyond its option, before any work."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import EngineConfig
from penstock.config.queue import QueueLimits
from penstock.config.request_limits import RequestLimits
from penstock.config.structured import StructuredOutputsConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.inputs.field_limits import check_body
from penstock.errors import InvalidParameter
from penstock.server.http import body as http_body
from penstock.server.http.errors import ApiError
from penstock.server.options import ServerOptions
from penstock.server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from penstock.server.protocol.base import RequestModel
from penstock.server.protocol.profiles import StartProfileRequest
from support.fake_engine import FakeCore, write_model
from support.servers import Served, serving

TINY: dict[str, Any] = {
    "max_request_values": 20_000,
    "max_request_numbers": 90_000,
    "max_request_items": 8,
    "max_request_choices": 8,
    "max_prompt_characters": 5000,
    "max_stop_strings": 2,
    "max_name_characters": 40,
    "max_field_bytes": 200,
}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, core: FakeCore) -> Iterator[Served]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    engine = AsyncEngine.from_config(EngineConfig.create(str(folder), **TINY), load_core=lambda _: core)
    with serving(engine) as served:
        yield served


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {"prompt": "a", "stop": ["a"] * 3}, "stop", "max_stop_strings"),
    ("/v1/completions", {"prompt": "a", "stop": ["a", 1, None]}, "stop", "max_stop_strings"),
    ("/v1/completions", {"prompt": ["a"] * 9}, "prompt", "max_request_items"),
    ("/v1/completions", {"prompt": ["a"] * 5, "n": 2}, "prompt", "max_request_choices"),
    ("/v1/completions", {"prompt": "a" * 5001, "truncate_prompt_tokens": 5}, "prompt", "max_prompt_characters"),
    ("/v1/completions", {"prompt": "a", "n": 9}, "n", "max_request_choices"),
    ("/v1/completions", {"prompt": "a", "user": "u" * 41}, "user", "max_name_characters"),
    ("/v1/completions", {"prompt": "a", "model": "m" * 41}, "model", "max_name_characters"),
    ("/v1/completions", {"prompt": "a", "vllm_xargs": {"a": "x" * 200}}, "vllm_xargs", "max_field_bytes"),
    ("/v1/completions", {"prompt": "a", "unknown": "x" * 200}, "unknown", "max_field_bytes"),
    ("/v1/chat/completions", {"messages": MESSAGES * 9}, "messages", "max_request_items"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a" * 5001}], "truncate_prompt_tokens": 5},
        "messages",
        "max_prompt_characters",
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{}] * 9}, "tools", "max_request_items"),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 9}, "n", "max_request_choices"),
    ("/v1/responses", {"input": [{}] * 9}, "input", "max_request_items"),
    ("/v1/responses", {"input": "Hi", "metadata": {"a": "x" * 200}}, "metadata", "max_field_bytes"),
    ("/v1/responses", {"input": "a" * 5001, "truncate_prompt_tokens": 5}, "input", "max_prompt_characters"),
    ("/v1/embeddings", {"input": ["a"] * 9}, "input", "max_request_items"),
    ("/rerank", {"query": "a", "documents": ["a"] * 9}, "documents", "max_request_items"),
    ("/tokenize", {"prompt": "a" * 5001}, "prompt", "max_prompt_characters"),
    ("/tokenize", {"messages": MESSAGES * 9}, "messages", "max_request_items"),
    ("/detokenize", {"tokens": [1] * 5001}, "tokens", "max_prompt_characters"),
]


@pytest.mark.parametrize(("path", "body", "param", "option"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_large_field_is_refused_by_name(
    server: Served, core: FakeCore, path: str, body: dict[str, Any], param: str, option: str
) -> None:
    num_before = len(core.added)
    reply = server.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert re.search(rf"Allowed: at most [\d,]+ \({option}\). .*{option}=", reply.error["message"])
    assert len(core.added) == num_before


@pytest.mark.parametrize(
    ("body", "option"),
    [
        ({"messages": MESSAGES * 9}, "max_request_items"),
        ({"messages": MESSAGES, "stop_sequences": ["a"] * 3}, "max_stop_strings"),
        ({"messages": MESSAGES, "system": [{"type": "text", "text": "a"}] * 9}, "max_request_items"),
        ({"messages": [{"role": "user", "content": "a" * 5001}], "truncate_prompt_tokens": 5}, "max_prompt_characters"),
    ],
)
def test_the_messages_api_has_the_same_limits(server: Served, body: dict[str, Any], option: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path == "/v1/messages" or "stop_sequences" not in body:
            limit = {"max_tokens": 1} if path == "/v1/messages" else {}
            reply = server.post(path, {**body, **limit})
            assert reply.status == 400
            assert f"({option})" in reply.json["error"]["message"]


def test_the_items_of_a_stored_conversation_count(server: Served) -> None:
    items = [{"role": "user", "content": "Hi"}] * 4
    first = server.post("/v1/responses", {"input": items, "max_output_tokens": 1}).json
    reply = server.post("/v1/responses", {"input": items, "previous_response_id": first["id"]})
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert "input has 9 items with those of the conversation before. Allowed: at most 8" in reply.error["message"]


def test_the_prompts_of_a_request_are_admitted_with_the_first_one(server: Served, core: FakeCore) -> None:
    core.added.clear()
    server.post("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1})
    assert [request.num_choices for request in core.added if not request.is_admitted] == [6]
    assert len(core.added) == 6
    core.added.clear()
    core.refuses = lambda request: True
    try:
        assert server.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1}).status == 400
        assert core.added == []
    finally:
        core.refuses = lambda request: False


def test_a_body_of_many_values_is_refused_before_it_is_decoded(server: Served) -> None:
    parts = [{"type": "text", "text": "a"}] * 10_000
    broken = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()[:-1]
    reply = server.post("/v1/chat/completions", broken)
    assert reply.status == 400
    assert "too many values. Allowed: at most 20,000" in reply.error["message"]


def test_a_body_of_many_numbers_is_refused_before_it_is_decoded(server: Served) -> None:
    reply = server.post("/v1/completions", b'{"prompt": [%s' % (b"1," * 100_000))
    assert "too many entries. Allowed: at most 90,000" in reply.error["message"]
    reply = server.post("/v1/completions", {"prompt": "a", **{f"field{number}": 1 for number in range(9)}})
    assert "The body has 10 fields. Allowed: at most 8 (max_request_items)" in reply.error["message"]


def test_punctuation_in_texts_is_no_value(server: Served) -> None:
    text = '["a": {1}] \\' * 9_000
    reply = server.post("/tokenize", {"prompt": text})
    assert "(max_prompt_characters)" in reply.error["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('"\\[{,é', max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[{', max_size=3), inner, max_size=4),
    max_leaves=30,
)


def num_values(value: Any) -> int:
    if isinstance(value, str):
        return 1
    if isinstance(value, dict):
        return 1 + sum(1 + num_values(inner) for inner in value.values())
    return 1 + sum(map(num_values, value)) if isinstance(value, list) else 0


@given(value=JSON, is_ascii=st.booleans())
def test_values_are_counted_without_decoding(value: Any, is_ascii: bool) -> None:
    body, most = json.dumps(value, ensure_ascii=is_ascii).encode(), num_values(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_body, "_SMALL_BYTES", 0)
        http_body.check_num_values(body, most, num_later_entries(value))
        if most:
            with pytest.raises(ApiError, match="too many values.*max_request_values"):
                http_body.check_num_values(body, most - 1, 1000)
        if num_later_entries(value):
            with pytest.raises(ApiError, match="too many entries.*max_request_numbers"):
                http_body.check_num_values(body, most, num_later_entries(value) - 1)


def num_later_entries(value: Any) -> int:
    """Entries but the first one of each list and object."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(inner) - 1) + sum(map(num_later_entries, inner))


def subclasses(model: type[Any]) -> Iterator[type[Any]]:
    for one in model.__subclasses__():
        yield one
        yield from subclasses(one)


BODIES = [*subclasses(RequestModel), LoadAdapterRequest, UnloadAdapterRequest, StartProfileRequest]
FIELDS = {(name, str(field.annotation)) for model in BODIES for name, field in model.model_fields.items()}
# Texts that become a prompt, or a part of one: `max_prompt_characters`.
PROMPTS = {"prompt", "input", "inputs", "query", "text_1", "text_2", "instructions", "system"}


@pytest.mark.parametrize(("name", "kind"), sorted(FIELDS))
def test_no_field_of_any_request_is_without_a_limit(name: str, kind: str) -> None:
    limits = RequestLimits(**{field.name: 5 for field in dataclasses.fields(RequestLimits)})
    sizes: list[Any] = []
    if "list[" in kind.lower() or name in ("messages", "tools", "documents"):
        sizes.append(["a"] * 10)
    if "dict[" in kind.lower():
        sizes.append({str(key): "a" for key in range(10)})
    if re.search(r"\bstr\b", re.sub(r"(list|dict)\[.*\]", "", kind)) and name not in PROMPTS:
        sizes.append("a" * 10)
    for value in sizes:
        with pytest.raises(InvalidParameter, match=f"^{name} has [1-9]"):
            check_body({name: value}, limits)


def test_the_table_of_limits_is_complete() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    section = page[page.index("## Limits of requests") :]
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+?) \|", section[: section.index("\n## ", 1)], re.MULTILINE))
    options = [
        *dataclasses.fields(RequestLimits),
        *dataclasses.fields(QueueLimits),
        *(field for field in dataclasses.fields(ServerOptions) if field.name.startswith("max_")),
        *(field for field in dataclasses.fields(StructuredOutputsConfig) if "max_grammar" in field.name),
    ]
    for field in options:
        assert rows.pop(field.name) == ("none" if field.default is None else f"{field.default:,}"), field.name
    assert rows.keys() == {"max_model_len", "max_logprobs", "request_read_timeout_s"}
