"""`/v1/chat/completions` through OpenAI's client, compared with the offline API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from penstock import LLM, SamplingParams
from penstock.errors import InvalidRequest
from support.servers import Served

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, who are you?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def answered(llm: LLM, messages: Any = MESSAGES, options: Any = (), **params: Any) -> Any:
    return llm.chat(messages, SamplingParams(**params), use_tqdm=False, **dict(options))[0]


def chat(client: OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "demo", "messages": messages, **fields})


def test_a_greedy_answer_is_that_of_the_offline_api(client: OpenAI, llm: LLM) -> None:
    expected = answered(llm, **GREEDY)
    response = chat(client, **GREEDY)
    assert response.choices[0].message.content == expected.outputs[0].text
    assert response.choices[0].message.role == "assistant"
    assert response.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert response.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_without_max_tokens_the_answer_goes_on_to_the_contexts_end(client: OpenAI) -> None:
    response = chat(client, temperature=0, extra_body={"ignore_eos": True})
    assert response.usage.total_tokens == 1024
    assert response.choices[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_is_kept_by_either_name(client: OpenAI, name: str) -> None:
    response = chat(client, extra_body={name: 3, "ignore_eos": True})
    assert response.usage.completion_tokens == 3


def test_samples_with_a_seed_are_those_of_the_offline_api(client: OpenAI, llm: LLM) -> None:
    expected = answered(llm, seed=5, n=2, max_tokens=10)
    response = chat(client, seed=5, n=2, max_tokens=10)
    assert [c.message.content for c in response.choices] == [output.text for output in expected.outputs]


def test_a_stream_has_the_role_first_the_usage_last_and_one_end_per_choice(client: OpenAI) -> None:
    fields: dict[str, Any] = {"seed": 5, "n": 2, "max_tokens": 10}
    whole = chat(client, **fields)
    texts, reasons, started = ["", ""], [None, None], [False, False]
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **fields))
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert chunk.usage is None
        assert reasons[choice.index] is None
        assert (choice.delta.role == "assistant") == (not started[choice.index])
        started[choice.index] = True
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len({chunk.id for chunk in chunks}) == 1


def test_many_streams_at_once_are_each_that_of_the_offline_api(server: Served, llm: LLM) -> None:
    conversations = [[{"role": "user", "content": f"Tell me of {number} things"}] for number in range(12)]

    async def stream(client: Any, messages: Any) -> str:
        chunks = await client.chat.completions.create(model="demo", messages=messages, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_streams() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(stream(client, messages) for messages in conversations))

    assert asyncio.run(all_streams()) == [answered(llm, one, **GREEDY).outputs[0].text for one in conversations]


def test_log_probabilities_are_those_of_the_offline_api(client: OpenAI, llm: LLM) -> None:
    output = answered(llm, logprobs=2, **GREEDY).outputs[0]
    content = chat(client, logprobs=True, top_logprobs=2, **GREEDY).choices[0].logprobs.content
    rows = [row[id] for row, id in zip(output.logprobs, output.token_ids, strict=True)]
    assert [entry.logprob for entry in content] == pytest.approx([entry.logprob for entry in rows])
    assert [entry.token for entry in content] == [entry.decoded_token for entry in rows]
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert content[0].bytes == list(content[0].token.encode())


def test_streamed_log_probabilities_add_up_to_the_whole(client: OpenAI) -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "stop": ["zzz"], **GREEDY}
    whole = chat(client, **fields).choices[0].logprobs.content
    chunks = chat(client, stream=True, **fields)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry for part in parts if part is not None for entry in part.content] == whole


def test_the_bytes_of_tokens_add_up_to_characters_that_no_token_has(client: OpenAI, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("日本😀", add_special_tokens=False)
    regex = "日本😀"
    response = chat(client, max_tokens=40, seed=1, logprobs=True, extra_body={"structured_outputs": {"regex": regex}})
    content = response.choices[0].logprobs.content
    assert any("\ufffd" in entry.token for entry in content)
    end = len(b"".join(bytes(entry.bytes) for entry in content)) - len(regex.encode())
    assert b"".join(bytes(entry.bytes) for entry in content)[: -end or None] == regex.encode()
    assert len(ids) >= len(content) - 1


def test_streamed_text_has_no_half_characters(client: OpenAI) -> None:
    body = {"structured_outputs": {"regex": "日本😀é"}}
    deltas = [c.choices[0].delta.content for c in chat(client, max_tokens=40, seed=1, stream=True, extra_body=body)]
    assert "".join(delta or "" for delta in deltas) == "日本😀é"


def test_parts_of_text_are_joined(client: OpenAI, llm: LLM) -> None:
    parts = [{"type": "text", "text": "Hello,"}, {"type": "text", "text": "who are you?"}]
    messages = [{"role": "user", "content": parts}]
    response = chat(client, messages, **GREEDY)
    assert response.choices[0].message.content == answered(llm, messages, **GREEDY).outputs[0].text


def test_a_developer_is_the_system_where_the_template_has_no_such_role(client: OpenAI) -> None:
    as_developer = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    assert chat(client, as_developer, **GREEDY).choices == chat(client, **GREEDY).choices


def test_a_template_of_the_request_keeps_its_developer(client: OpenAI) -> None:
    body = {"chat_template": "{{ messages[0].role }}: {{ name }}", "chat_template_kwargs": {"name": "x"}}
    body |= {"return_token_ids": True, "add_special_tokens": False}
    response = chat(client, [{"role": "developer", "content": "a"}], max_tokens=1, extra_body=body)
    text = client.post("/../detokenize", body={"tokens": response.prompt_token_ids}, cast_to=object)
    assert text == {"prompt": "developer: x"}


def test_a_message_is_continued(client: OpenAI, llm: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "I am a"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = answered(llm, messages, options, **GREEDY).outputs[0].text
    message = chat(client, messages, extra_body=options, **GREEDY).choices[0].message
    assert message.content == expected
    echoed = chat(client, messages, extra_body={**options, "echo": True}, **GREEDY).choices[0].message
    assert echoed.content == "I am a" + expected
    stream = chat(client, messages, extra_body={**options, "echo": True}, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "I am a" + expected


def test_json_is_an_object(client: OpenAI, llm: LLM) -> None:
    expected = answered(llm, seed=2, max_tokens=40, structured_outputs={"json_object": True}).outputs[0].text
    response = chat(client, seed=2, max_tokens=40, response_format={"type": "json_object"})
    assert response.choices[0].message.content == expected


def test_priority_is_given_to_the_engine(client: OpenAI) -> None:
    assert chat(client, max_tokens=1, extra_body={"priority": 3}).usage.completion_tokens == 1
    with pytest.raises(BadRequestError, match="priority"):
        chat(client, max_tokens=1, extra_body={"priority": 2**70})


def test_documents_are_a_variable_of_the_template(client: OpenAI) -> None:
    body = {"documents": [{"text": "abc"}], "chat_template": "{{ documents[0].text }}", "return_token_ids": True}
    response = chat(client, max_tokens=1, extra_body=body)
    text = client.post("/../detokenize", body={"tokens": response.prompt_token_ids}, cast_to=object)
    assert text == {"prompt": "abc"}


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 999}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 4, "max_tokens": 5}, "max_completion_tokens"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"temprature": 1}, "temprature"),
    ({"stream": "yes"}, "stream"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template": "/etc/hostname"}, "chat_template"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_a_bad_value_is_refused_with_the_fields_name(server: Served, fields: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, **fields})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert param.rpartition(".")[2] in reply.error["message"]


def test_an_unknown_field_gets_a_suggestion(server: Served) -> None:
    reply = server.post("/v1/chat/completions", {"messages": MESSAGES, "temprature": 1})
    assert reply.error["message"] == "There is no field temprature. Did you mean temperature?"


def test_a_field_of_vllms_gets_its_new_name(server: Served) -> None:
    reply = server.post("/v1/chat/completions", {"messages": MESSAGES, "guided_json": {}})
    assert reply.error["message"] == "There is no field guided_json. Give structured_outputs."


def test_a_conversation_that_is_too_long_names_the_messages(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(client, [{"role": "user", "content": "word " * 3000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_the_templates_own_refusal_reaches_the_client(client: OpenAI, llm: LLM) -> None:
    messages = [{"role": "critic", "content": "x"}]
    with pytest.raises(InvalidRequest) as expected:
        answered(llm, messages)
    with pytest.raises(BadRequestError) as caught:
        chat(client, messages)
    assert str(expected.value) in caught.value.message
