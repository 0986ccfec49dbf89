"""Tool calls of models whose template shows no tools, and of the demo model, on a server without further options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from penstock import LLM
from penstock.engine.async_engine import AsyncEngine
from server.conftest import DEMO
from support.chat_templates import TOOL_TEMPLATE, WITHOUT_TOOLS
from support.servers import Served, serving


class Pick(BaseModel):
    """A colour and a number."""

    colour: Literal["red", "green"]
    number: Literal[1, 2, 3]


class Say(BaseModel):
    word: Literal["yes", "no"]


KINDS: dict[str, type[BaseModel]] = {"Pick": Pick, "Say": Say}
TOOLS: Any = [pydantic_function_tool(Pick), pydantic_function_tool(Say)]
FIXED = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
LENIENT: Any = [{"type": "function", "function": {"name": "f", "parameters": FIXED}}]
PICK: Any = {"type": "function", "function": {"name": "Pick"}}
USER: Any = {"role": "user", "content": "Pick one."}
HEADER = "x-penstock-tools"


@pytest.fixture(scope="module", params=[None, WITHOUT_TOOLS], ids=["demo", "no tools"])
def template(request: pytest.FixtureRequest) -> str | None:
    """Chat template of the server; None for the demo model's own."""
    chosen: str | None = request.param
    return chosen


@pytest.fixture(scope="module")
def server(template: str | None) -> Iterator[Served]:
    engine = AsyncEngine("demo", enable_multiprocessing=False, **DEMO)
    with serving(engine, chat_template=template, trust_request_chat_template=True) as served:
        yield served


def ask(client: OpenAI, *messages: Any, **fields: Any) -> Any:
    given = {"model": "demo", "messages": messages or [USER], "tools": TOOLS, "seed": 1, "max_tokens": 200, **fields}
    return client.chat.completions.create(**given)


def test_a_named_call_follows_its_schema(client: OpenAI) -> None:
    choice = ask(client, tool_choice=PICK).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, choice.message.content) == ("tool_calls", "Pick", None)
    Pick.model_validate_json(call.function.arguments)


def test_required_calls_come_for_each_choice(client: OpenAI) -> None:
    for choice in ask(client, tool_choice="required", n=3, temperature=1.0, max_tokens=300).choices:
        assert choice.message.tool_calls
        # The limit may cut off the last one of a model that repeats itself.
        for call in choice.message.tool_calls[: -1 if choice.finish_reason == "length" else None]:
            KINDS[call.function.name].model_validate_json(call.function.arguments)


def test_one_call_comes_at_most_without_parallel_ones(client: OpenAI) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False, temperature=1.5, n=4)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1] * 4


def test_a_streamed_call_is_the_whole_one(client: OpenAI) -> None:
    whole = ask(client, tool_choice=PICK, temperature=0)
    chunks = list(ask(client, tool_choice=PICK, temperature=0, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls if call.id] == ["Pick"]
    arguments = "".join(call.function.arguments for call in calls)
    assert arguments == whole.choices[0].message.tool_calls[0].function.arguments


def test_parsed_tools_of_the_client_are_objects(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model="demo", messages=[USER], tools=TOOLS, tool_choice=PICK, seed=2)
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Pick)


def test_strict_tools_may_be_left_to_the_model(client: OpenAI) -> None:
    for choice in ask(client, tool_choice="auto", n=4, temperature=1.0, max_tokens=40).choices:
        assert choice.message.content or choice.message.tool_calls or choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_calls_that_the_model_decides_on_are_read(client: OpenAI, stream: bool) -> None:
    # The only text that the model may write, so that it decides so.
    form = {"choice": ['[{"name": "f", "parameters": {"a": 1}}]']}
    answer = ask(client, tools=LENIENT, extra_body={"structured_outputs": form}, stream=stream)
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    calls = [call for part in parts for call in part.tool_calls or []]
    assert calls[0].function.name == "f"
    assert calls[0].function.arguments == '{"a": 1}' or stream
    assert not any(part.content for part in parts)


def test_a_template_that_writes_calls_as_a_parser_reads_them_needs_no_option(client: OpenAI) -> None:
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    call = "{{ '<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}"
    calls = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
    template = (
        "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}" + calls + "{% endfor %}"
    )
    form = {"structured_outputs": {"choice": [written]}, "chat_template": template, "add_generation_prompt": False}
    answer = ask(client, tools=LENIENT, extra_body=form)
    (found,) = answer.choices[0].message.tool_calls[:1]
    assert (found.function.name, found.function.arguments) == ("f", '{"a": 1}')
    with pytest.raises(BadRequestError, match="--tool-call-parser"):
        ask(client, tools=LENIENT, extra_body={"chat_template": TOOL_TEMPLATE})


def test_content_may_have_a_form_beside_tools(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "say", "schema": Say.model_json_schema()}}
    for choice in ask(client, response_format=form, n=4, temperature=1.0).choices:
        if not choice.message.tool_calls:
            Say.model_validate_json(choice.message.content)


def test_a_conversation_goes_on_with_results(client: OpenAI) -> None:
    called = ask(client, tool_choice=PICK).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Taken."}
    for choice in ("auto", "none", PICK):
        assert ask(client, USER, called, result, tool_choice=choice, max_tokens=100).choices[0].message


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_header_says_that_the_template_shows_no_tools(server: Served, template: str | None, stream: bool) -> None:
    expected = None if template is None else "in-message"
    body = {"messages": [USER], "tools": LENIENT, "max_tokens": 1, "stream": stream}
    assert server.post("/v1/chat/completions", body).headers.get(HEADER) == expected
    assert HEADER not in server.post("/v1/chat/completions", {**body, "tool_choice": "none"}).headers
    flat = [{"type": "function", **LENIENT[0]["function"]}]
    given = {"model": "demo", "input": "Hi", "tools": flat, "max_output_tokens": 1, "stream": stream}
    assert server.post("/v1/responses", given).headers.get(HEADER) == expected


def test_responses_call_functions(client: OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for stream in (False, True):
        fields: Any = {"model": "demo", "input": "Pick one.", "tools": tools, "temperature": 0}
        choice: Any = {"type": "function", "name": "Pick"}
        if stream:
            with client.responses.stream(**fields, tool_choice=choice) as events:
                answer: Any = events.get_final_response()
        else:
            answer = client.responses.create(**fields, tool_choice=choice)
        (call,) = answer.output
        assert (call.type, call.name) == ("function_call", "Pick")
        Pick.model_validate_json(call.arguments)


def test_clients_of_ollama_may_give_tools(server: Served, template: str | None) -> None:
    expected = None if template is None else "in-message"
    asked = {"model": "demo", "messages": [USER], "tools": TOOLS, "stream": False, "options": {"num_predict": 2}}
    assert server.post("/api/chat", asked).headers.get(HEADER) == expected
    assert "tools" in server.post("/api/show", {"model": "demo"}).json["capabilities"]


def test_messages_use_tools(server: Served) -> None:
    anthropic: Any = Anthropic(base_url=server.url, api_key="unused", max_retries=0)
    tools: Any = [{"name": "Pick", "description": "A colour", "input_schema": Pick.model_json_schema()}]
    fields: Any = {"model": "demo", "messages": [USER], "tools": tools, "max_tokens": 200}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "Pick"}):
        message = anthropic.messages.create(**fields, tool_choice=choice)
        assert message.stop_reason == "tool_use"
        Pick.model_validate(message.content[-1].input)
    assert anthropic.messages.create(**{**fields, "max_tokens": 4}).content is not None
    plain = anthropic.messages.count_tokens(model="demo", messages=[USER]).input_tokens
    assert anthropic.messages.count_tokens(model="demo", messages=[USER], tools=tools).input_tokens > plain + 50


def test_offline_chats_see_tools_too() -> None:
    with LLM("demo", **DEMO) as llm:
        for template in (None, WITHOUT_TOOLS):
            (output,) = llm.chat([USER], tools=TOOLS, chat_template=template)
            assert "Pick" in (output.prompt or "")
            assert '[{"name": "FUNCTION"' in (output.prompt or "")
