"""Hidden states over HTTP are those of the offline API, as numbers and in base64, whole and at a stream's end."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from penstock import LLM, SamplingParams
from penstock.features.hidden_states.messages import HiddenStates
from support.servers import Served, events_of

PROMPT = "ROMEO:\nO, she doth teach"
PARAMS: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


def offline(llm: LLM, which: str, layers: list[int] | None = None) -> HiddenStates:
    options: dict[str, Any] = {"return_hidden_states": which, "hidden_states_layers": layers}
    (output,) = llm.generate(PROMPT, SamplingParams(**PARAMS), use_tqdm=False, **options)
    states = output.outputs[0].hidden_states
    assert states is not None
    return states


def choice(server: Served, **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/completions", {"model": "demo", "prompt": PROMPT, **PARAMS, **fields})
    assert reply.status == 200, reply.json
    return reply.json["choices"][0]  # type: ignore[no-any-return]


def decoded(value: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"])


@pytest.mark.parametrize("which", [True, "last"])
def test_the_last_token_is_a_list_of_numbers(server: Served, llm: LLM, which: Any) -> None:
    found = choice(server, return_hidden_states=which)["hidden_states"]
    assert found == offline(llm, "last")[-1][0].tolist()


def test_all_tokens_are_a_list_per_token(server: Served, llm: LLM) -> None:
    found, expected = choice(server, return_hidden_states="all")["hidden_states"], offline(llm, "all")
    assert found == expected[-1].tolist()
    assert len(found) == expected.num_tokens


@pytest.mark.parametrize("which", ["last", "all"])
def test_layers_are_by_number_and_base64_has_their_bits(server: Served, llm: LLM, which: str) -> None:
    fields = {"return_hidden_states": which, "hidden_states_layers": [0, -1]}
    found = choice(server, **fields, encoding_format="base64")["hidden_states"]
    expected = offline(llm, which, [0, -1])
    assert list(found) == ["0", "-1"]
    for layer in (0, -1):
        rows = expected[layer] if which == "all" else expected[layer][0]
        assert np.array_equal(decoded(found[str(layer)]), rows.numpy())
    assert (
        choice(server, **fields)["hidden_states"]["0"] == (expected[0] if which == "all" else expected[0][0]).tolist()
    )


def test_a_stream_has_them_in_its_last_chunk(server: Served, llm: LLM) -> None:
    body = {"model": "demo", "prompt": PROMPT, **PARAMS, "return_hidden_states": True, "stream": True, "n": 1}
    chunks = [json.loads(text) for text in events_of(server.post("/v1/completions", body).body) if text != "[DONE]"]
    *others, last = [chunk["choices"][0] for chunk in chunks]
    assert last["hidden_states"] == offline(llm, "last")[-1][0].tolist()
    assert last["finish_reason"] == "length"
    assert all("hidden_states" not in one for one in others)


def test_chats_and_each_of_several_choices_have_them(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Who are you?"}]
    fields: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 4, "n": 2, "seed": 1}
    extra = {"return_hidden_states": "all"}
    whole = client.chat.completions.create(**fields, extra_body=extra)
    num_tokens = whole.usage.prompt_tokens + 4 - 1
    assert all(len(one.hidden_states) == num_tokens for one in whole.choices)
    of_stream: dict[int, Any] = {}
    for chunk in client.chat.completions.create(**fields, extra_body=extra, stream=True):
        (one,) = chunk.choices
        if one.finish_reason is not None:
            of_stream[one.index] = one.hidden_states
    assert [of_stream[index] for index in range(2)] == [one.hidden_states for one in whole.choices]


def test_responses_and_messages_have_those_of_chats(server: Served) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    fields = {"model": "demo", "temperature": 0, "return_hidden_states": "all", "hidden_states_layers": [0, 3]}
    chat = server.post("/v1/chat/completions", {**fields, "messages": messages, "max_tokens": 4}).json["choices"][0]
    expected = chat["hidden_states"]
    assert list(expected) == ["0", "3"]

    body = {**fields, "input": "Who are you?", "max_output_tokens": 4}
    response = server.post("/v1/responses", body).json
    assert response["hidden_states"] == expected
    *_, ended = map(json.loads, events_of(server.post("/v1/responses", {**body, "stream": True}).body))
    assert ended["response"]["hidden_states"] == expected
    # The store does not keep them.
    stored = server.request("GET", f"/v1/responses/{response['id']}").json
    assert stored == {name: value for name, value in response.items() if name != "hidden_states"}

    body = {**fields, "messages": messages, "max_tokens": 4}
    assert server.post("/v1/messages", body).json["hidden_states"] == expected
    events = map(json.loads, events_of(server.post("/v1/messages", {**body, "stream": True}).body))
    (delta,) = [one["delta"] for one in events if one["type"] == "message_delta"]
    assert delta["hidden_states"] == expected


def test_each_conversation_of_a_batch_has_them(server: Served) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    fields = {"model": "demo", "temperature": 0, "max_tokens": 4, "return_hidden_states": True}
    one = server.post("/v1/chat/completions", {**fields, "messages": messages}).json["choices"][0]
    several = server.post("/v1/chat/completions/batch", {**fields, "messages": [messages] * 2}).json["choices"]
    assert [choice["hidden_states"] for choice in several] == [one["hidden_states"]] * 2


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/responses", {"input": "a", "background": True, "return_hidden_states": True}, "without background=true"),
        ("/v1/responses", {"input": "a", "encoding_format": "float"}, "only with return_hidden_states"),
        (
            "/v1/completions/render",
            {"prompt": "a", "return_hidden_states": True},
            "/inference/v1/generate have no",
        ),
        ("/pooling", {"input": "a", "return_hidden_states": True}, 'task="token_embed" returns a vector per token'),
        ("/v1/embeddings", {"input": "a", "hidden_states_layers": [1]}, 'task="token_embed" returns a vector'),
    ],
)
def test_other_apis_refuse_what_they_do_not_return(
    server: Served, path: str, fields: dict[str, Any], message: str
) -> None:
    reply = server.post(path, {"model": "demo", **fields})
    assert reply.status == 400
    assert message in reply.error["message"]


def test_without_the_field_there_are_none(server: Served) -> None:
    assert "hidden_states" not in choice(server)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"return_hidden_states": "first"}, "return_hidden_states", "last"),
        ({"hidden_states_layers": [1]}, "hidden_states_layers", "has no meaning without return_hidden_states"),
        (
            {"return_hidden_states": True, "hidden_states_layers": [99]},
            "hidden_states_layers",
            "the model has 6 layers",
        ),
        ({"encoding_format": "base64"}, "encoding_format", "only with return_hidden_states"),
    ],
)
def test_what_cannot_be_returned_is_refused_by_name(
    client: OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(BadRequestError, match=message) as refused:
        client.completions.create(model="demo", prompt=PROMPT, extra_body=fields)
    assert refused.value.param == param
