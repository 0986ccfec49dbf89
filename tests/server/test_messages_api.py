"""`/v1/messages` through Anthropic's client, compared with chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, AuthenticationError, BadRequestError, NotFoundError
from openai import OpenAI
from tests.server.conftest import DEMO

from penstock.engine.async_engine import AsyncEngine
from penstock.server.messages.output import call_input
from penstock.server.requests import chat_task
from support.chat_templates import TOOL_TEMPLATE
from support.scripted_answers import NUM_REASONING_TOKENS, TEXT, MarkedAnswer
from support.servers import Served, events_of, serving

KEY = "secret"
SEEDED: dict[str, Any] = {"seed": 3, "temperature": 1, "top_p": 0.9}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "description": "The weather", "input_schema": SCHEMA}]
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA}}
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = AsyncEngine("demo", enable_multiprocessing=False, **DEMO)
    options: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serving(engine, api_keys=(KEY,), chat_template=TOOL_TEMPLATE, **options) as served:
        yield served


@pytest.fixture
def client(server: Served) -> OpenAI:
    return server.client(api_key=KEY)


@pytest.fixture
def anthropic(server: Served) -> Anthropic:
    return Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


def ask(anthropic: Anthropic, *messages: Any, **fields: Any) -> Any:
    body = fields.pop("extra_body", {})
    given = messages or [user("Hello, who are you?")]
    return anthropic.messages.create(
        **{"model": "demo", "messages": given, "max_tokens": 12, "extra_body": body, **fields}
    )


def chat(client: OpenAI, *messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "demo", "messages": messages, "max_tokens": 12, **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def texts(*parts: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part, **fields} for part in parts]


def test_an_answer_is_that_of_chat_completions(anthropic: Anthropic, client: OpenAI) -> None:
    message = ask(anthropic, user("Hello"), extra_body=SEEDED)
    expected = chat(client, user("Hello"), **SEEDED)
    assert [block.text for block in message.content] == [expected.choices[0].message.content]
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert message.usage.output_tokens == expected.usage.completion_tokens
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert message.id.startswith("msg_")


@pytest.mark.parametrize("system", ["Be brief.", texts("Be brief.", cache_control={"type": "ephemeral"})])
def test_the_system_prompt_is_the_system_message(anthropic: Anthropic, client: OpenAI, system: Any) -> None:
    message = ask(anthropic, user("Hello"), system=system, extra_body=SEEDED)
    expected = chat(client, {"role": "system", "content": "Be brief."}, user("Hello"), **SEEDED)
    assert message.content[0].text == expected.choices[0].message.content


def test_blocks_are_those_of_a_chat(anthropic: Anthropic, client: OpenAI) -> None:
    call: Any = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "é", "days": 1}}
    thinking: Any = {"type": "thinking", "thinking": "hm", "signature": "x"}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
        {"type": "tool_result", "tool_use_id": "c2", "content": texts("rain"), "is_error": False},
    ]
    messages = [
        user(texts("The", "weather?", cache_control={"type": "ephemeral"})),
        {"role": "assistant", "content": [thinking, *texts("I look."), call, {**call, "id": "c2"}]},
        user([*results, *texts("Well?")]),
    ]
    function = {"name": "weather", "arguments": json.dumps(call["input"])}
    calls = [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")]
    expected = chat(
        client,
        user(texts("The", "weather?")),
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        user("Well?"),
        tools=CHAT_TOOLS,
        tool_choice="none",
        **SEEDED,
    )
    message = ask(anthropic, *messages, tools=TOOLS, tool_choice={"type": "none"}, extra_body=SEEDED)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert message.content[0].text == expected.choices[0].message.content


@pytest.mark.parametrize("arguments", [{}, None, [1], '{"a": '], ids=str)
def test_a_result_that_is_an_error_says_so(anthropic: Anthropic, client: OpenAI, arguments: Any) -> None:
    # What is no object is what clients made of a call that was cut off, or of arguments that the model malformed.
    call: Any = {"type": "tool_use", "id": "c1", "name": "weather", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no city", "is_error": True}
    function = {"name": "weather", "arguments": "{}"}
    expected = chat(
        client,
        user("Hi"),
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "Error: no city"},
        **SEEDED,
    )
    message = ask(anthropic, user("Hi"), {"role": "assistant", "content": [call]}, user([result]), extra_body=SEEDED)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert message.content[0].text == expected.choices[0].message.content


def test_a_message_of_the_assistant_at_the_end_is_continued(anthropic: Anthropic, client: OpenAI) -> None:
    messages = [user("Hello"), {"role": "assistant", "content": "I am a"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    expected = chat(client, *messages, extra_body=options, **SEEDED)
    assert ask(anthropic, *messages, extra_body=SEEDED).content[0].text == expected.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3, "extra_body": {"ignore_eos": True}}, "max_tokens", None),
        ({"max_tokens": 100, "extra_body": {"temperature": 0}}, "end_turn", None),
        ({"max_tokens": 100, "stop_sequences": ["zzz", "e"], "extra_body": {"temperature": 0}}, "stop_sequence", "e"),
    ],
    ids=str,
)
def test_the_reason_of_the_end_is_named(anthropic: Anthropic, fields: Any, reason: str, sequence: str | None) -> None:
    message = ask(anthropic, **fields)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    ends = [event for event in ask(anthropic, stream=True, **fields) if event.type == "message_delta"]
    assert [(end.delta.stop_reason, end.delta.stop_sequence) for end in ends] == [(reason, sequence)]
    assert ends[0].usage.output_tokens == message.usage.output_tokens


def test_cached_tokens_are_counted_apart(anthropic: Anthropic) -> None:
    question = user("A long question that fills more than one block of the cache. " * 4)
    first, second = (ask(anthropic, question, max_tokens=1).usage for _ in range(2))
    assert second.cache_read_input_tokens >= 16
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens + first.cache_read_input_tokens


def test_the_events_of_a_text_come_in_order(server: Served, anthropic: Anthropic) -> None:
    body = {"model": "demo", "messages": [user("Hello")], "max_tokens": 50, "temperature": 0, "stream": True}
    reply = server.post("/v1/messages", body, x_api_key=KEY)
    events = [json.loads(data) for data in events_of(reply.body)]
    names = [line.removeprefix("event: ") for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert list(dict.fromkeys(names)) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    whole = ask(anthropic, user("Hello"), max_tokens=50, extra_body={"temperature": 0})
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole.content[0].text
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[0]["message"]["content"] == []


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_follows_its_schema(anthropic: Anthropic, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    message = ask(anthropic, tools=TOOLS, tool_choice=choice, max_tokens=300)
    (block,) = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(block.input) == {"city", "days"}


def test_a_streamed_call_adds_up_to_the_whole(anthropic: Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    fields: Any = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 300, "extra_body": {"seed": 8}}
    whole = ask(anthropic, user("Hi"), **fields)
    with anthropic.messages.stream(model="demo", messages=[user("Hi")], **fields) as stream:  # type: ignore[list-item]
        final = stream.get_final_message()
    (block,) = final.content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("weather", whole.content[0].input)
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def test_a_call_that_is_cut_off_has_no_input(anthropic: Anthropic) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 200}}, "required": ["text"]}
    tools = [{"name": "write", "input_schema": schema}]
    message = ask(anthropic, tools=tools, tool_choice={"type": "any"}, max_tokens=80)
    assert (message.stop_reason, message.content[-1].input) == ("max_tokens", {})


def test_the_model_decides_whether_it_calls_tools(anthropic: Anthropic) -> None:
    message = ask(anthropic, tools=TOOLS, extra_body={"temperature": 0})
    assert [block.type for block in message.content] == ["text"]


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_output_format_constrains_the_text(anthropic: Anthropic, client: OpenAI, field: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    body = {field: {"format": form} if field == "output_config" else form, "seed": 4}
    message = ask(anthropic, user("A city"), max_tokens=200, extra_body=body)
    chat_form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    expected = chat(client, user("A city"), max_tokens=200, seed=4, response_format=chat_form)
    assert message.content[0].text == expected.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ],
    ids=str,
)
def test_thinking_is_a_variable_of_the_template(
    anthropic: Anthropic, client: OpenAI, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    message = ask(anthropic, user("Hi"), **fields, extra_body=SEEDED)
    expected = chat(client, user("Hi"), extra_body={"chat_template_kwargs": variables}, **SEEDED)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert message.content[0].text == expected.choices[0].message.content


def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_task, "choose_format", lambda **options: MarkedAnswer(TEXT))


def test_an_answer_of_all_kinds_has_its_blocks_in_order(anthropic: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    message = ask(anthropic, max_tokens=100)
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    assert blocks == [
        {"type": "thinking", "thinking": "hm ", "signature": ""},
        {"type": "tool_use", "id": "call-1", "name": "f", "input": {"a": 1}},
        {"type": "text", "text": ", "},
        {"type": "tool_use", "id": "call-2", "name": "g", "input": {}},
        {"type": "text", "text": " done"},
    ]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens == NUM_REASONING_TOKENS


def test_a_streamed_answer_of_all_kinds_adds_up(anthropic: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    whole = ask(anthropic, max_tokens=100)
    given: Any = {"model": "demo", "messages": [user("Hello, who are you?")], "max_tokens": 100}
    with anthropic.messages.stream(**given) as stream:
        final = stream.get_final_message()
    assert [block.model_dump(exclude_none=True) for block in final.content] == [
        block.model_dump(exclude_none=True) for block in whole.content
    ]
    events = list(ask(anthropic, max_tokens=100, stream=True))
    edges = [
        (event.type, event.index) for event in events if event.type in ("content_block_start", "content_block_stop")
    ]
    assert edges == [(kind, index) for index in range(5) for kind in ("content_block_start", "content_block_stop")]


@pytest.mark.parametrize(
    ("arguments", "expected"), [("", {}), ('{"a": 1}', {"a": 1}), ('{"a": ', {}), ("[1]", {}), ("null", {})]
)
def test_the_input_of_a_call_is_an_object(arguments: str, expected: Any) -> None:
    assert call_input(arguments) == expected


def test_tokens_are_counted_as_the_answer_counts_them(anthropic: Anthropic) -> None:
    given: Any = {"messages": [user("Hello, who are you?")], "system": "Be brief.", "tools": TOOLS}
    count = anthropic.messages.count_tokens(model="demo", **given).input_tokens
    usage = anthropic.messages.create(model="demo", max_tokens=1, **given).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_coding_agents_request_is_served(server: Served, anthropic: Anthropic) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools = [{"name": f"mcp__server__tool_{number}", "input_schema": {"type": "object"}} for number in range(9)]
    body = {
        "model": "demo",
        "max_tokens": 32_000,
        "stream": True,
        "temperature": 0,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
            {"type": "text", "text": "You are an agent.", **cached},
        ],
        "messages": [user([{"type": "text", "text": "<system-reminder>x</system-reminder>"}, *texts("Hi", **cached)])],
        "tools": [*tools[:-1], {**tools[-1], **cached}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "claude-code-20250219,prompt-caching-scope"}
    reply = server.post("/v1/messages?beta=true", body, x_api_key=KEY, **headers)
    assert reply.status == 200, reply.body
    assert json.loads(events_of(reply.body)[-1]) == {"type": "message_stop"}
    start = json.loads(events_of(reply.body)[0])["message"]["usage"]
    without = {key: body[key] for key in ("messages", "tools", "thinking", "output_config")}
    count = anthropic.messages.count_tokens(model="demo", system="You are an agent.", **without)  # type: ignore[arg-type]
    assert start["input_tokens"] + start["cache_read_input_tokens"] == count.input_tokens


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
    ({"messages": [user([{"type": "image", "source": {}}])]}, "messages[0].content[0].source.type"),
    ({"messages": [user([{"type": "image", "source": {"type": "url", "url": "a"}}])]}, "is an image"),
    ({"messages": [user([{"type": "tool_result", "content": "x"}])]}, "messages[0].content[0].tool_use_id is missing"),
    (
        {"messages": [user([{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}])]},
        "messages[0].content[0].content[0].source",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
        "messages[0].content[0].name",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"top_k": -5}, "top_k"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "'f'"),
    ({"container": "x"}, "container"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "tuple"}}}, "output_format.schema"),
    ({"max_token": 3}, "Did you mean max_tokens"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED, ids=str)
def test_a_bad_value_is_refused_in_anthropics_shape(server: Served, fields: dict[str, Any], text: str) -> None:
    body = {"model": "demo", "max_tokens": 5, "messages": [user("x")], **fields}
    reply = server.post("/v1/messages", body, x_api_key=KEY)
    assert reply.status == 400
    assert (reply.json["type"], reply.json["error"]["type"]) == ("error", "invalid_request_error")
    assert text in reply.json["error"]["message"]


def test_errors_before_the_route_have_anthropics_shape(server: Served, anthropic: Anthropic) -> None:
    with pytest.raises(AuthenticationError) as refused:
        ask(Anthropic(base_url=server.url, api_key="wrong", max_retries=0))
    assert refused.value.type == "authentication_error"
    with pytest.raises(NotFoundError) as caught:
        ask(anthropic, model="other")
    assert caught.value.type == "not_found_error"
    reply = server.post("/v1/messages", "{", Authorization=f"Bearer {KEY}")
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert server.request("GET", "/v1/messages/batches", x_api_key=KEY).json["type"] == "error"


def test_a_bearer_token_is_a_key_as_well(server: Served) -> None:
    assert ask(Anthropic(base_url=server.url, auth_token=KEY, max_retries=0)).role == "assistant"


def test_a_prompt_that_is_too_long_is_refused(anthropic: Anthropic) -> None:
    with pytest.raises(BadRequestError, match="max_model_len"):
        ask(anthropic, user("word " * 3000))


def test_a_stream_that_fails_ends_with_an_error(server: Served) -> None:
    body = {"model": "demo", "max_tokens": 900, "messages": [user("x")], "stream": True, "ignore_eos": True}
    # On a busy machine a short deadline passes before the stream begins.
    replies = (server.post("/v1/messages", {**body, "timeout": 0.05 * 4**n}, x_api_key=KEY) for n in range(4))
    last = next(json.loads(events[-1]) for reply in replies if (events := events_of(reply.body)))
    assert last["type"] == "error"
    assert "timeout" in last["error"]["message"]
