"""Ollama's API: its requests and lines against a real server, with the answers of the other APIs as the oracle."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from penstock.server.ollama.protocol import OllamaChatRequest
from penstock.server.ollama.request import chat_request
from penstock.server.requests import chat_task
from support.pooling_models import random_text
from support.scripted_answers import TEXT, MarkedAnswer
from support.servers import Served

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
GREEDY = {"temperature": 0, "num_predict": 8}
CHAT = {"model": "demo:latest", "messages": MESSAGES, "options": GREEDY}


def lines_of(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = served.post(path, body)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.splitlines()]


def test_a_chat_is_that_of_chat_completions(server: Served, client: OpenAI) -> None:
    expected = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_completion_tokens=8)
    whole = server.post("/api/chat", {**CHAT, "stream": False}).json
    assert whole["message"] == {"role": "assistant", "content": expected.choices[0].message.content}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("demo:latest", True, "length")
    assert expected.usage is not None
    assert whole["prompt_eval_count"] == expected.usage.prompt_tokens
    assert whole["eval_count"] == expected.usage.completion_tokens == 8
    assert whole["total_duration"] > 0


def test_a_body_needs_no_content_type_but_from_a_browser(server: Served) -> None:
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    body = {**CHAT, "stream": False}
    assert server.post("/api/chat", body, **form).json["message"] == server.post("/api/chat", body).json["message"]
    refused = server.post("/api/chat", body, **form, Origin="http://elsewhere.example")
    assert (refused.status, "Content-Type: application/json" in refused.json["error"]) == (400, True)


def test_a_stream_is_lines_that_join_to_the_whole(server: Served) -> None:
    whole = server.post("/api/chat", {**CHAT, "stream": False}).json
    lines = lines_of(server, "/api/chat", CHAT)
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) > 1
    assert lines[-1]["eval_count"] == 8


def test_generate_answers_a_prompt_as_a_chat_and_continues_it_with_raw(server: Served, client: OpenAI) -> None:
    asked = {"model": "demo", "prompt": "Who are you?", "system": "Be brief.", "options": GREEDY, "stream": False}
    chat = server.post("/api/chat", {**CHAT, "stream": False}).json
    assert server.post("/api/generate", asked).json["response"] == chat["message"]["content"]
    raw = {"model": "demo", "prompt": "Once upon a time", "raw": True, "options": GREEDY}
    expected = client.completions.create(model="demo", prompt="Once upon a time", temperature=0, max_tokens=8)
    lines = lines_of(server, "/api/generate", raw)
    assert "".join(line["response"] for line in lines) == expected.choices[0].text


def test_a_format_constrains_the_answer(server: Served) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    body = {**CHAT, "options": {"temperature": 0, "num_predict": 60}, "format": schema, "stream": False}
    answer = json.loads(server.post("/api/chat", body).json["message"]["content"])
    assert isinstance(answer["n"], int)


def test_log_probabilities_are_those_of_the_tokens(server: Served) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    whole = server.post("/api/chat", {**body, "stream": False}).json
    assert len(whole["logprobs"]) == 8
    assert {"token", "logprob", "top_logprobs"} <= whole["logprobs"][0].keys()
    streamed = [entry for line in lines_of(server, "/api/chat", body) for entry in line.get("logprobs", ())]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole["logprobs"]]


@pytest.mark.parametrize(("path", "body"), [("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})])
def test_a_request_without_a_text_says_that_the_model_is_loaded(
    server: Served, path: str, body: dict[str, Any]
) -> None:
    (line,) = lines_of(server, path, {"model": "demo", "keep_alive": "5m", **body})
    assert (line["done"], line["done_reason"]) == (True, "load")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat=2 is not available. Allowed: 0."),
        ({"options": {"temprature": 1}}, "There is no field options.temprature. Allowed: temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature='hot' is not valid. Allowed: a number."),
        ({"options": {"temperature": -1}}, "options.temperature=-1"),
        ({"options": {"stop": 1}}, "options.stop=1 is not valid. Allowed: text, or a list of texts."),
        ({"format": "xml"}, "format='xml' is not valid."),
        ({"format": {"type": "nothing"}}, "format"),
        (
            {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
            "messages[0].content[0] of type",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0] is the result of a tool"),
        ({"messages": [{"role": "user", "content": "a", "colour": 1}]}, "There is no field messages[0].colour"),
        ({"template": "{{ .Prompt }}"}, "template="),
        ({"temperature": 0}, "There is no field temperature"),
    ],
)
def test_errors_name_the_field_in_ollamas_shape(server: Served, changes: dict[str, Any], message: str) -> None:
    reply = server.post("/api/chat", {**CHAT, **changes})
    assert reply.status == 400, reply.body
    assert reply.json.keys() == {"error"}
    assert reply.json["error"].startswith(message)


def test_options_that_change_nothing_are_ignored(server: Served) -> None:
    options = {**GREEDY, "num_ctx": 4096, "num_gpu": 1, "mirostat": 0, "mirostat_tau": 5, "num_predict": 1}
    assert server.post("/api/chat", {**CHAT, "options": options, "stream": False}).status == 200


def test_the_model_is_listed_and_described(server: Served) -> None:
    names = [model["name"] for model in server.request("GET", "/api/tags").json["models"]]
    assert names == ["demo", "other-name"]
    for path in ("/api/tags", "/api/ps"):
        one, other = server.request("GET", path).json["models"]
        assert one["digest"] == other["digest"]
        assert len(one["digest"]) == 64
        assert one["size"] > 1 << 20
        assert one["details"]["format"] == "safetensors"
        assert datetime.fromisoformat(one["modified_at"]) < datetime.now(UTC)
    assert datetime.fromisoformat(one["expires_at"]) > datetime.now(UTC)
    assert one["context_length"] > 0
    shown = server.post("/api/show", {"model": "demo"}).json
    assert shown["capabilities"] == ["completion", "tools"]
    assert "{%" in shown["template"]
    family = shown["details"]["family"]
    assert shown["model_info"][f"{family}.context_length"] > 0
    assert server.request("GET", "/api/version").json["version"]
    assert server.post("/api/show", {"model": "none"}).status == 404


def test_results_of_tools_belong_to_the_calls_of_their_names() -> None:
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("add", "sub")]
    messages = [
        *MESSAGES,
        {"role": "assistant", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "tool_name": "sub", "content": "0"},
        {"role": "tool", "tool_name": "add", "content": "2"},
    ]
    chat, _ = chat_request(OllamaChatRequest.model_validate({**CHAT, "messages": messages}))
    answer, first, second = (message.model_dump(exclude_none=True) for message in chat.messages[2:])
    assert answer["reasoning"] == "hm"
    assert answer["tool_calls"][1] == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "sub", "arguments": '{"x": 1}'},
    }
    assert (first["tool_call_id"], second["tool_call_id"]) == ("call_1", "call_0")


def test_an_answer_of_all_kinds_has_thinking_text_and_whole_calls(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_task, "choose_format", lambda **options: MarkedAnswer(TEXT))
    body = {"model": "demo", "messages": MESSAGES, "options": {"num_predict": 100}}
    whole = server.post("/api/chat", {**body, "stream": False}).json
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": {}}}]
    assert whole["message"] == {
        "role": "assistant",
        "content": ",  done",
        "thinking": "hm ",
        "tool_calls": calls,
    }
    assert whole["done_reason"] == "stop"
    messages = [line["message"] for line in lines_of(server, "/api/chat", body)]
    assert "".join(message.get("thinking", "") for message in messages) == "hm "
    assert "".join(message["content"] for message in messages) == ",  done"
    assert [call for message in messages for call in message.get("tool_calls", ())] == calls


def test_thinking_is_a_variable_of_the_template() -> None:
    for think, effort in ((True, None), (False, None), ("low", "low")):
        chat, _ = chat_request(OllamaChatRequest.model_validate({**CHAT, "think": think}))
        assert chat.chat_template_kwargs == {"enable_thinking": think is not False}
        assert chat.reasoning_effort == effort


def test_embeddings_are_the_oracles(embedder: tuple[Served, Any]) -> None:
    served, oracle = embedder
    texts = [random_text(num, seed=num) for num in (3, 8)]
    body = served.post("/api/embed", {"model": "demo", "input": texts}).json
    np.testing.assert_allclose(body["embeddings"], oracle.encode(texts), atol=1e-5)
    assert body["prompt_eval_count"] > 0
    assert served.post("/api/embed", {"input": []}).json["embeddings"] == []
    assert served.post("/api/show", {"model": "demo"}).json["capabilities"] == ["embedding"]
    # The older form: one text, and its vector without normalisation.
    old = np.array(served.post("/api/embeddings", {"model": "demo:latest", "prompt": texts[0]}).json["embedding"])
    assert abs(np.linalg.norm(old) - 1) > 0.1
    np.testing.assert_allclose(old / np.linalg.norm(old), oracle.encode(texts)[0], atol=1e-5)
    assert served.post("/api/embeddings", {}).json == {"embedding": []}
    assert served.post("/api/embeddings", {"model": "none"}).status == 404
    # Longer than the model's context: cut unless truncate is false.
    long = random_text(2000, seed=1)
    assert len(served.post("/api/embeddings", {"prompt": long}).json["embedding"]) == len(old)
    assert len(served.post("/api/embed", {"input": long}).json["embeddings"]) == 1
    refused = served.post("/api/embed", {"input": long, "truncate": False})
    assert refused.status == 400
    assert "longer" in refused.json["error"] or "tokens" in refused.json["error"]


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("POST", "/api/pull", "pull models"),
        ("DELETE", "/api/delete", "delete models"),
        ("POST", "/api/create", "create models"),
        ("POST", "/api/blobs/sha256:0", "store files of models"),
    ],
)
def test_routes_that_manage_models_say_what_the_server_does(server: Served, method: str, path: str, what: str) -> None:
    reply = server.request(method, path, b'{"model": "llama3"}')
    assert reply.status == 404
    assert f"This server cannot {what}: it serves demo, other-name as long as it runs." in reply.json["error"]
    assert "`penstock serve MODEL`" in reply.json["error"]
