"""Reasoning and tool calls in chat completions: of a scripted answer format, and of the model's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from penstock.engine.async_engine import AsyncEngine
from penstock.server.requests import chat_task
from support.scripted_answers import NUM_REASONING_TOKENS, TEXT, MarkedAnswer
from support.servers import Served, serving

TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
TEMPLATE = "{{ messages[0].content }}{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %}"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = AsyncEngine("demo", enable_multiprocessing=False, num_threads=1, kv_cache_memory_bytes=8 << 20)
    options: dict[str, Any] = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    with serving(engine, chat_template=TEMPLATE, **options) as served:
        yield served


@pytest.fixture
def client(server: Served) -> OpenAI:
    return server.client()


def ask(client: OpenAI, monkeypatch: pytest.MonkeyPatch, text: str = TEXT, **fields: Any) -> Any:
    monkeypatch.setattr(chat_task, "choose_format", lambda **options: MarkedAnswer(text))
    messages: Any = [{"role": "user", "content": "Do"}]
    return client.chat.completions.create(
        **{"model": "demo", "messages": messages, "tools": TOOLS, "seed": 1, "max_completion_tokens": 100, **fields}
    )


def test_a_whole_answer_has_its_parts(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = ask(client, monkeypatch).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == ",  done"
    assert choice.message.reasoning == choice.message.reasoning_content == "hm "
    calls = [(call.id, call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("call-1", "function", "f", '{"a":1}'), ("call-2", "function", "g", "{}")]


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_answer_adds_up_to_the_whole(client: OpenAI, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    whole = ask(client, monkeypatch, n=n)
    with client.chat.completions.stream(
        model="demo",
        messages=[{"role": "user", "content": "Do"}],
        tools=TOOLS,
        seed=1,
        max_completion_tokens=100,
        n=n,
    ) as stream:
        final = stream.get_final_completion()
    for choice, expected in zip(final.choices, whole.choices, strict=True):
        assert choice.message.content == expected.message.content
        assert choice.finish_reason == expected.finish_reason == "tool_calls"
        assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []] == [
            (call.id, call.function.name, call.function.arguments) for call in expected.message.tool_calls
        ]


def test_streamed_calls_have_id_type_and_name_once(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = [chunk.choices[0].delta for chunk in ask(client, monkeypatch, stream=True)]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    starts = [(call.index, call.id, call.type, call.function.name) for call in calls if call.id is not None]
    assert starts == [(0, "call-1", "function", "f"), (1, "call-2", "function", "g")]
    for index, arguments in enumerate(('{"a":1}', "{}")):
        assert "".join(call.function.arguments for call in calls if call.index == index) == arguments
    reasoning = [delta.reasoning for delta in deltas if getattr(delta, "reasoning", None)]
    assert "".join(reasoning) == "hm "


def test_reasoning_is_left_out_on_request(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    message = ask(client, monkeypatch, extra_body={"include_reasoning": False}).choices[0].message
    assert not hasattr(message, "reasoning")
    assert message.content == ",  done"


def test_an_answer_of_calls_only_has_no_content(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    message = ask(client, monkeypatch, 'x <f>{"a":1}</f>').choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "finish_reason"), [("1", "stop"), ("</f>", "tool_calls")])
def test_a_call_that_a_stop_string_cuts_is_not_to_be_called(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch, stop: str, finish_reason: str, stream: bool
) -> None:
    answer = ask(client, monkeypatch, 'x <f>{"a":1}</f>', stop=stop, stream=stream)
    choice = list(answer)[-1].choices[0] if stream else answer.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == (finish_reason, stop)


@pytest.mark.parametrize("n", [1, 2])
def test_the_usage_has_the_reasoning_of_all_samples(client: OpenAI, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    usage = ask(client, monkeypatch, n=n).usage
    assert usage.completion_tokens_details.reasoning_tokens == n * NUM_REASONING_TOKENS
    chunks = list(ask(client, monkeypatch, n=n, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == usage


def test_an_answer_without_reasoning_has_no_reasoning_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Do"}], max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_all_tokens_stay(client: OpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    response = ask(client, monkeypatch, logprobs=True, stream=stream)
    parts = [part.choices[0].logprobs for part in response] if stream else [response.choices[0].logprobs]
    text = "".join(entry.token for part in parts if part is not None for entry in part.content)
    assert text.startswith(TEXT)


@pytest.mark.parametrize("limit", [3, 12])
def test_an_answer_that_is_cut_off_ends_with_length(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    assert ask(client, monkeypatch, max_completion_tokens=limit).choices[0].finish_reason == "length"


@pytest.mark.parametrize(("choice", "prompt"), [(None, "Do f g"), ("auto", "Do f g"), ("none", "Do")])
def test_tools_are_in_the_prompt_unless_none_is_chosen(
    server: Served, client: OpenAI, monkeypatch: pytest.MonkeyPatch, choice: str | None, prompt: str
) -> None:
    response = ask(client, monkeypatch, extra_body={"tool_choice": choice, "return_token_ids": True})
    assert server.post("/detokenize", {"tokens": response.prompt_token_ids}).json == {"prompt": prompt}


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_follows_its_schema(client: OpenAI, stream: bool) -> None:
    cities = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": cities}}]
    fields: Any = {"model": "demo", "messages": [{"role": "user", "content": "Do"}], "tools": tools, "seed": 2}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    if stream:
        with client.chat.completions.stream(**fields, tool_choice=choice, max_completion_tokens=200) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = client.chat.completions.create(**fields, tool_choice=choice, max_completion_tokens=200).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
