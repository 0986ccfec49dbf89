"""Routes beside those of the clients' APIs: tokens in and out, rendered requests, batches, SageMaker, descriptions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI
from tests.server.conftest import DEMO

from penstock.engine.async_engine import AsyncEngine
from penstock.server.http.guards import ADMIN_PATHS
from penstock.server.processes import health
from support.servers import Served, events_of, serving
from support.waiting import wait_until


@pytest.fixture(scope="module")
def admin() -> Iterator[Served]:
    engine = AsyncEngine("demo", enable_multiprocessing=False, **DEMO)
    with serving(engine, enable_admin=True, admin_api_key="boss") as served:
        yield served


MESSAGES = [{"role": "user", "content": "Who are you?"}]
OTHERS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "seed": 5}


def test_a_rendered_chat_generates_the_tokens_of_the_chat(server: Served) -> None:
    body = {**CHAT, "logit_bias": {"5": -3}, "stop": ["zzz"], "min_p": 0.01, "logprobs": True, "top_logprobs": 1}
    rendered = server.post("/v1/chat/completions/render", body).json
    assert rendered["model"] == "demo"
    assert rendered["request_id"].startswith("chatcmpl-")
    assert rendered["sampling_params"]["max_tokens"] == 8
    chat = server.post("/v1/chat/completions", {**body, "return_token_ids": True}).json
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    (choice,) = server.post("/inference/v1/generate", rendered).json["choices"]
    assert choice["token_ids"] == chat["choices"][0]["token_ids"]
    assert choice["finish_reason"] == "length"
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{id}" for id in choice["token_ids"]]
    assert entries[0]["logprob"] == chat["choices"][0]["logprobs"]["content"][0]["logprob"]


def test_rendered_prompts_are_a_list(server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"prompt": ["Once", "Never"], "max_tokens": 30, "temperature": 0, "response_format": form}
    first, second = server.post("/v1/completions/render", body).json
    for one, text in ((first, "Once"), (second, "Never")):
        assert one["token_ids"] == server.post("/tokenize", {"prompt": text}).json["tokens"]
    choices = [server.post("/inference/v1/generate", one).json["choices"][0] for one in (first, second)]
    expected = server.post("/v1/completions", {**body, "return_token_ids": True}).json["choices"]
    assert [one["token_ids"] for one in choices] == [one["token_ids"] for one in expected]


def test_tokens_are_streamed(server: Served) -> None:
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 6, "seed": 3, "n": 2},
        "request_id": "mine",
    }
    whole = server.post("/inference/v1/generate", body).json
    assert whole["request_id"] == "mine"
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    reply = server.post("/inference/v1/generate", {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events_of(reply.body)
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    for index in (0, 1):
        token_ids = [id for choice in choices if choice["index"] == index for id in choice["token_ids"]]
        assert token_ids == whole["choices"][index]["token_ids"]
    assert json.loads(usage)["usage"]["completion_tokens"] == 12
    assert done == "[DONE]"


def test_a_choice_that_ends_before_others_ends_once_in_a_stream(server: Served) -> None:
    params = {"max_tokens": 12, "seed": 3, "n": 4, "temperature": 2.0, "ignore_eos": True}
    body: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": params}
    each = [set(one["token_ids"]) for one in server.post("/inference/v1/generate", body).json["choices"]]
    only = next(iter(each[1] - each[0] - each[2] - each[3]))
    body |= {"sampling_params": {**params, "stop_token_ids": [only]}, "stream": True}
    *chunks, _ = events_of(server.post("/inference/v1/generate", body).body)
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    ends = sorted((one["index"], one["finish_reason"]) for one in choices if one["finish_reason"] is not None)
    assert ends == [(0, "length"), (1, "stop"), (2, "length"), (3, "length")]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"features": {"image": []}}, "features"),
        ({"prompt": "a"}, "prompt"),
    ],
)
def test_wrong_fields_of_tokens_are_named(server: Served, changes: dict[str, Any], param: str) -> None:
    reply = server.post("/inference/v1/generate", {"token_ids": [1], **changes})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert server.post("/inference/v1/generate", {"token_ids": [10**6]}).status == 400


def test_a_batch_has_the_answer_of_each_conversation(server: Served) -> None:
    batch = server.post("/v1/chat/completions/batch", {**CHAT, "messages": [MESSAGES, OTHERS]}).json
    single = [server.post("/v1/chat/completions", {**CHAT, "messages": one}).json for one in (MESSAGES, OTHERS)]
    assert [one["index"] for one in batch["choices"]] == [0, 1]
    assert [one["message"] for one in batch["choices"]] == [one["choices"][0]["message"] for one in single]
    assert batch["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in single)


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "f"}}, "required", "auto"], ids=["named", "required", "auto"]
)
def test_each_conversation_of_a_batch_may_call_tools(server: Served, choice: Any) -> None:
    fixed = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": fixed}}]
    # Where the model decides, this is all that it may write.
    form = {"structured_outputs": {"choice": ['[{"name": "f", "parameters": {"a": 1}}]']}} if choice == "auto" else {}
    body = {**CHAT, "messages": [MESSAGES, OTHERS], "tools": tools, "tool_choice": choice, "max_tokens": 60, **form}
    batch = server.post("/v1/chat/completions/batch", {**body, "parallel_tool_calls": False}).json
    for one in batch["choices"]:
        (call,) = one["message"]["tool_calls"]
        assert (one["finish_reason"], call["function"]["name"]) == ("tool_calls", "f")
        assert json.loads(call["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": [MESSAGES, [{"role": "tool", "content": "x"}]]}, "messages[1]: messages[0].tool_call_id"),
        ({"messages": MESSAGES}, "messages[0]="),
        ({"messages": []}, "messages="),
        ({"messages": [MESSAGES], "stream": True}, "stream=true is not available."),
        ({"messages": [MESSAGES], "n": 2}, "n=2 is not available."),
        ({"messages": [MESSAGES], "temperature": -1}, "temperature=-1"),
    ],
)
def test_errors_of_a_batch_name_the_conversation(server: Served, changes: dict[str, Any], message: str) -> None:
    reply = server.post("/v1/chat/completions/batch", {**CHAT, **changes})
    assert reply.status == 400
    assert reply.error["message"].startswith(message)


def test_invocations_are_requests_of_the_route_that_their_fields_tell(server: Served, client: OpenAI) -> None:
    chat = server.post("/invocations", {**CHAT, "num_ctx": 1}).json
    assert chat["choices"][0]["message"]["content"]
    completion = server.post("/invocations", {"prompt": "Once", "max_tokens": 4, "temperature": 0}).json
    expected = client.completions.create(model="demo", prompt="Once", max_tokens=4, temperature=0)
    assert completion["choices"][0]["text"] == expected.choices[0].text
    assert events_of(server.post("/invocations", {**CHAT, "stream": True}).body)[-1] == "[DONE]"
    assert server.post("/invocations", {"text": "a"}).error["message"].startswith("The body tells no route.")
    assert server.post("/invocations", {"prompt": "a", "temprature": 1}).error["param"] == "temprature"
    assert server.post("/invocations", {"input": "a"}).status == 400


def test_the_tokenizers_configuration_is_returned(server: Served) -> None:
    info = server.request("GET", "/tokenizer_info").json
    assert info["tokenizer_class"]
    assert "{%" in info["chat_template"]


def test_probes_for_sagemaker_and_balancers() -> None:
    state = SimpleNamespace(status=SimpleNamespace(num_requests=3), why_dead=lambda: None)
    http: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(health=state)))
    assert asyncio.run(health.ping(http)).status_code == 200
    assert json.loads(asyncio.run(health.load(http)).body) == {"server_load": 3}
    state.why_dead, state.status = lambda: "it hangs", None
    assert asyncio.run(health.ping(http)).status_code == 503
    assert json.loads(asyncio.run(health.load(http)).body) == {"server_load": 0}


def test_a_request_is_aborted_by_the_id_of_its_response(admin: Served) -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "request_id": "long", "stream": True}
    with admin.client().completions.create(model="demo", prompt="a", stream=True, extra_body=body) as stream:
        ids = [next(iter(stream)).id]
        assert admin.post("/abort_requests", {"request_ids": ids}, Authorization="Bearer boss").status == 200
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    wait_until(lambda: admin.engine.get_num_unfinished_requests() == 0, "the request ends")


def test_the_engines_options_are_shown_to_the_admin(admin: Served) -> None:
    reply = admin.request("GET", "/server_info?config_format=json", Authorization="Bearer boss").json
    assert reply["vllm_config"]["scheduler"]["max_num_seqs"] == 16
    text = admin.request("GET", "/server_info", Authorization="Bearer boss").json["vllm_config"]
    assert text.startswith("EngineConfig(")
    for path in ADMIN_PATHS & {"/server_info", "/abort_requests"}:
        assert admin.request("GET", path).status == 401


def test_a_route_of_the_administration_says_which_option_serves_it(server: Served) -> None:
    reply = server.post("/reset_prefix_cache", {})
    expected = "/reset_prefix_cache is there with --enable-admin and --admin-api-key only."
    assert (reply.status, reply.error["message"]) == (404, expected)
    assert "/reset_prefix_cache" not in server.request("GET", "/openapi.json").json["paths"]
