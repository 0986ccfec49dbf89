"""`/v1/responses` through OpenAI's client, compared with chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from penstock.server.requests import chat_task
from support.chat_templates import TOOL_TEMPLATE
from support.scripted_answers import NUM_REASONING_TOKENS, TEXT, MarkedAnswer
from support.servers import Served

SEEDED: dict[str, Any] = {"seed": 3, "temperature": 1}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "The weather", "parameters": PARAMETERS, "strict": True}
]
CHAT_TOOLS: Any = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
WITH_TEMPLATE = {"chat_template": TOOL_TEMPLATE}


def respond(client: OpenAI, input: Any = "Hello, who are you?", **fields: Any) -> Any:
    body = {"seed": fields.pop("seed", None), **fields.pop("extra_body", {})}
    return client.responses.create(
        **{"model": "demo", "input": input, "max_output_tokens": 12, "extra_body": body, **fields}
    )


def chat(client: OpenAI, *messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "demo", "messages": messages, "max_tokens": 12, **fields})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_text_is_a_users_message(client: OpenAI) -> None:
    response = respond(client, "Hello, who are you?", **SEEDED)
    expected = chat(client, user("Hello, who are you?"), **SEEDED)
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.usage.output_tokens == expected.usage.completion_tokens
    assert response.usage.total_tokens == expected.usage.total_tokens


def test_instructions_are_the_system_message(client: OpenAI) -> None:
    response = respond(client, "Who are you?", instructions="Be brief.", **SEEDED)
    expected = chat(client, {"role": "system", "content": "Be brief."}, user("Who are you?"), **SEEDED)
    assert response.output_text == expected.choices[0].message.content
    assert response.instructions == "Be brief."


def test_instructions_and_the_first_developer_messages_are_one_system_message(client: OpenAI) -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "system", "content": [{"type": "input_text", "text": text} for text in ("Be calm.", "Be here.")]},
        user("Who are you?"),
        {"role": "developer", "content": "Be quick."},
    ]
    response = respond(client, items, instructions="Be brief.", **SEEDED)
    first = {"role": "system", "content": "Be brief.\nBe kind.\nBe calm.\nBe here."}
    expected = chat(client, first, user("Who are you?"), {"role": "developer", "content": "Be quick."}, **SEEDED)
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens


def test_developer_messages_without_instructions_stay_of_the_developer(client: OpenAI) -> None:
    items = [{"role": "developer", "content": text} for text in ("a", "b")]
    template = "{{ messages | length }} {{ messages[0].role }} {{ messages[0].content }}"
    response = respond(client, items, extra_body={"chat_template": template}, **SEEDED)
    joined = {"role": "developer", "content": "a\nb"}
    expected = chat(client, joined, extra_body={"chat_template": template}, **SEEDED)
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens


def test_messages_and_parts_are_those_of_a_chat(client: OpenAI) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Who"}, {"type": "input_text", "text": "are you?"}],
        },
    ]
    last = {"role": "user", "content": [{"type": "text", "text": text} for text in ("Who", "are you?")]}
    expected = chat(
        client,
        {"role": "system", "content": "Be brief."},
        user("Hello"),
        {"role": "assistant", "content": "Hi."},
        last,
        **SEEDED,
    )
    assert respond(client, items, **SEEDED).output_text == expected.choices[0].message.content


def test_an_answer_at_its_limit_is_incomplete(client: OpenAI) -> None:
    response = respond(client, max_output_tokens=3, extra_body={"ignore_eos": True})
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 3


def test_an_answer_that_ends_is_completed(client: OpenAI) -> None:
    response = respond(client, temperature=0, max_output_tokens=100)
    assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
    assert response.output[0].status == "completed"


def test_the_response_repeats_its_request(client: OpenAI) -> None:
    response = respond(
        client, temperature=0.5, top_p=0.9, metadata={"a": "b"}, reasoning={"effort": "low"}, store=False, user="x"
    )
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 12)
    assert (response.metadata, response.reasoning.effort, response.store) == ({"a": "b"}, "low", False)
    assert (response.model, response.object, response.tool_choice) == ("demo", "response", "auto")


ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def test_the_events_of_a_text_come_in_order_and_add_up(client: OpenAI) -> None:
    whole = respond(client, temperature=0, max_output_tokens=100)
    events = list(respond(client, temperature=0, max_output_tokens=100, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert list(dict.fromkeys(event.type for event in events)) == ORDER
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert final.output[0].id == events[2].item.id
    assert (final.usage.output_tokens, final.id) == (whole.usage.output_tokens, events[0].response.id)


def test_a_stream_that_is_cut_off_ends_with_incomplete(client: OpenAI) -> None:
    events = list(respond(client, max_output_tokens=2, stream=True, extra_body={"ignore_eos": True}))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_the_clients_own_accumulation_is_the_whole(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "input": "Hello", "temperature": 0, "max_output_tokens": 50}
    with client.responses.stream(**fields) as stream:
        final = stream.get_final_response()
    assert final.output_text == respond(client, "Hello", temperature=0, max_output_tokens=50).output_text


def test_log_probabilities_are_those_of_chat_completions(client: OpenAI) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, **SEEDED}
    given = respond(client, "Hello", **fields).output[0].content[0].logprobs
    expected = chat(client, user("Hello"), logprobs=True, top_logprobs=2, **SEEDED).choices[0].logprobs.content
    assert [(entry.token, entry.logprob) for entry in given] == [(entry.token, entry.logprob) for entry in expected]
    assert [len(entry.top_logprobs) for entry in given] == [2] * len(given)
    events = list(respond(client, "Hello", stream=True, **fields))
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in deltas] == [entry.token for entry in given][: len(deltas)]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in given]


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
def test_a_text_format_constrains_the_text(client: OpenAI, form: str) -> None:
    given = {"type": form} if form == "json_object" else {"type": form, "name": "weather", "schema": PARAMETERS}
    response = respond(client, "A city", text={"format": given}, max_output_tokens=200, seed=4)
    chat_form = {"type": form, "json_schema": {"name": "weather", "schema": PARAMETERS}}
    expected = chat(
        client,
        user("A city"),
        max_tokens=200,
        seed=4,
        response_format={"type": form} if form == "json_object" else chat_form,
    )
    assert response.output_text == expected.choices[0].message.content
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_follows_its_schema(client: OpenAI, choice: Any) -> None:
    response = respond(
        client,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=300,
        extra_body=WITH_TEMPLATE,
    )
    (call,) = response.output
    assert (call.type, call.name, call.status, response.status) == (
        "function_call",
        "weather",
        "completed",
        "completed",
    )
    assert set(json.loads(call.arguments)) == {"city", "days"}
    assert call.call_id != call.id


def test_a_streamed_call_adds_up_to_the_whole(client: OpenAI) -> None:
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 300,
        "extra_body": WITH_TEMPLATE,
        "seed": 8,
    }
    whole = respond(client, **fields)
    events = list(respond(client, stream=True, **fields))
    assert list(dict.fromkeys(event.type for event in events)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == whole.output[0].arguments == events[-1].response.output[0].arguments
    assert events[-3].arguments == whole.output[0].arguments


def test_calls_and_their_results_are_those_of_a_chat(client: OpenAI) -> None:
    items = [
        user("Weather?"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "a", "days": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "b", "days": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    calls = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in items[3:5]
    ]
    expected = chat(
        client,
        user("Weather?"),
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        tools=CHAT_TOOLS,
        tool_choice="none",
        extra_body=WITH_TEMPLATE,
        **SEEDED,
    )
    response = respond(client, items, tools=TOOLS, tool_choice="none", extra_body=WITH_TEMPLATE, **SEEDED)
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.output_text == expected.choices[0].message.content


@pytest.mark.parametrize("effort", ["low", "none"])
def test_the_effort_of_reasoning_is_a_variable_of_the_template(client: OpenAI, effort: str) -> None:
    variables: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        variables["enable_thinking"] = False
    response = respond(client, "Hi", reasoning={"effort": effort}, extra_body=WITH_TEMPLATE, **SEEDED)
    expected = chat(client, user("Hi"), extra_body={**WITH_TEMPLATE, "chat_template_kwargs": variables}, **SEEDED)
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.output_text == expected.choices[0].message.content


def scripted(monkeypatch: pytest.MonkeyPatch, client: OpenAI, **fields: Any) -> Any:
    monkeypatch.setattr(chat_task, "choose_format", lambda **options: MarkedAnswer(TEXT))
    return respond(client, "Do", max_output_tokens=100, seed=1, **fields)


def test_an_answer_of_all_kinds_has_its_items_in_order(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    response = scripted(monkeypatch, client)
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "function_call", "message", "function_call", "message"]
    reasoning, first, comma, second, done = response.output
    assert reasoning.content[0].text == "hm "
    assert [(call.call_id, call.name, call.arguments) for call in (first, second)] == [
        ("call-1", "f", '{"a":1}'),
        ("call-2", "g", "{}"),
    ]
    assert [message.content[0].text for message in (comma, done)] == [", ", " done"]
    assert response.usage.output_tokens_details.reasoning_tokens == NUM_REASONING_TOKENS


def test_a_streamed_answer_of_all_kinds_adds_up(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scripted(monkeypatch, client)
    events = list(scripted(monkeypatch, client, stream=True))
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    final = events[-1].response
    assert added == [item.id for item in done] == [item.id for item in final.output]
    assert [item.model_dump(exclude={"id"}) for item in done] == [
        item.model_dump(exclude={"id"}) for item in whole.output
    ]
    assert [item.model_dump() for item in final.output] == [item.model_dump() for item in done]
    assert [event.type for event in events[2:7] if "delta" not in event.type] == [
        "response.output_item.added",
        "response.content_part.added",
    ]
    reasoning = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(reasoning) == "hm "


def test_a_request_that_fails_ends_its_stream_with_failed(client: OpenAI) -> None:
    events = list(respond(client, stream=True, max_output_tokens=900, extra_body={"timeout": 0.05, "ignore_eos": True}))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert "timeout" in events[-1].response.error.message


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "tuple"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"n": 2}, "n"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_a_bad_value_is_refused_with_the_fields_name(server: Served, fields: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/responses", {"model": "demo", "input": "x", **fields})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert param.rpartition(".")[2] in reply.error["message"]


def test_an_input_that_is_too_long_is_named(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        respond(client, "word " * 3000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_fields_about_accounts_are_accepted(client: OpenAI) -> None:
    response = respond(
        client,
        prompt_cache_key="x",
        safety_identifier="y",
        service_tier="auto",
        max_tool_calls=3,
        truncation="disabled",
        background=False,
        include=["reasoning.encrypted_content"],
        text={"verbosity": "low"},
    )
    assert response.status in ("completed", "incomplete")
