"""Requests in the shapes of client libraries, agents and editors: the server accepts their fields and messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.async_engine import AsyncEngine
from support.servers import Served, events_of, serving

# Takes roles and messages of tools, which the demo model's own template refuses.
TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
STRICT = {**PARAMETERS, "additionalProperties": False}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "Hello"}
SYSTEM = {"role": "system", "content": "You are helpful."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def schema_format(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": STRICT, "strict": True, **more}}


CHATS: dict[str, dict[str, Any]] = {
    "langchain invoke": {"messages": [SYSTEM, USER], "temperature": 0.7, "n": 1, "stream": False, "seed": None},
    "langchain stream": {"messages": [USER], **USAGE, "max_completion_tokens": 8, "stop": ["\nObservation:"]},
    "langchain bound tools": {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False},
    "langchain chosen tool": {
        "messages": [USER],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    },
    "langchain structured output": {"messages": [USER], "response_format": schema_format(), "stream": False},
    "langchain results of tools": {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
        "tools": TOOLS,
    },
    "langchain logprobs": {"messages": [{**USER, "name": "anna"}], "logprobs": True, "top_logprobs": 2, "user": "u"},
    "litellm": {
        "messages": [{"role": "system", "content": [part("Be brief.", cache_control={"type": "ephemeral"})]}, USER],
        **USAGE,
        "temperature": 0,
        "metadata": {"trace": "1"},
        "user": "",
        "extra_body": None,
        "logit_bias": None,
    },
    "litellm answers sent back": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "Hi",
                "tool_calls": None,
                "function_call": None,
                "provider_specific_fields": None,
                "reasoning_content": "It greets.",
                "annotations": [],
                "audio": None,
                "refusal": None,
            },
            USER,
        ],
    },
    "continue chat": {
        "messages": [SYSTEM, {"role": "user", "content": [part("Explain this.")]}],
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "stop": ["<|im_end|>", "<|im_start|>"],
        **USAGE,
    },
    "aider": {
        "messages": [
            {"role": "system", "content": "Act as an expert"},
            USER,
            {"role": "assistant", "content": "Ok."},
            USER,
        ],
        "stream": True,
        "temperature": 0,
        "reasoning_effort": "low",
    },
    "cline": {
        "messages": [SYSTEM, {"role": "user", "content": [part("<task>Do it</task>"), part("<environment>")]}],
        **USAGE,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    },
    "zed": {
        "messages": [SYSTEM, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, USER],
        "stream": True,
        "stop": [],
        "temperature": 1.0,
        "max_completion_tokens": 8,
        "parallel_tool_calls": False,
        "prompt_cache_key": "thread",
        "tools": TOOLS,
        "tool_choice": "auto",
    },
    "ai sdk": {
        "messages": [{"role": "user", "content": [part("Hello")]}],
        "temperature": 0,
        "max_tokens": 8,
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": True, "parameters": STRICT}}],
        "tool_choice": "required",
        **USAGE,
    },
    "agents sdk": {
        "messages": [{"role": "developer", "content": "Be brief."}, USER],
        "store": False,
        "metadata": None,
        "verbosity": None,
        "tools": TOOLS,
        "tool_choice": "auto",
        "prompt_cache_retention": None,
        **USAGE,
    },
    "instructor": {
        "messages": [USER],
        "response_format": schema_format(description="An answer"),
        "max_tokens": 30,
    },
    "autogen": {"messages": [{**USER, "name": "planner"}], "tools": [], "stream": False, "response_format": None},
    "llama index": {"messages": [USER], "temperature": 0.1, "max_tokens": None, "stream": False, "timeout": None},
    "json mode": {"messages": [USER], "response_format": {"type": "json_object"}, "max_tokens": 8},
    "vllm's fields": {
        "messages": [USER],
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "chat_template_kwargs": {"enable_thinking": False},
        "skip_special_tokens": True,
        "add_generation_prompt": True,
    },
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "langchain": {
        "prompt": ["Hello"],
        "temperature": 0.7,
        "max_tokens": 8,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "n": 1,
        "best_of": 1,
        "logit_bias": {},
        "seed": None,
        "logprobs": None,
    },
    "continue autocomplete": {
        "prompt": "<fim_prefix>def f(<fim_suffix>)<fim_middle>",
        "suffix": "",
        "max_tokens": 8,
        "temperature": 0.01,
        "stop": [
            "<fim_prefix>",
            "<fim_suffix>",
            "<fim_middle>",
            "<file_sep>",
            "<|endoftext|>",
            "\n\n",
            "\r\n\r\n",
            "```",
        ],
        "stream": True,
    },
    "lm-eval log-likelihoods": {
        "prompt": [[1, 5, 6, 7]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    },
    "lm-eval generation": {"prompt": ["Hello"], "max_tokens": 8, "temperature": 0, "stop": ["\n"], "seed": 1234},
    "litellm": {"prompt": "Hello", "max_tokens": 8, **USAGE, "user": "u", "suffix": None},
    "vllm's benchmark": {
        "prompt": "Hello",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "ignore_eos": True,
        **USAGE,
    },
}
CASES = [
    pytest.param(f"/v1/{path}", body, id=f"{path}: {name}")
    for path, bodies in (("chat/completions", CHATS), ("completions", COMPLETIONS))
    for name, body in bodies.items()
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = AsyncEngine("demo", enable_multiprocessing=False, num_threads=1, kv_cache_memory_bytes=32 << 20)
    options = {"chat_template": TEMPLATE, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serving(engine, **options) as served:
        yield served


@pytest.mark.parametrize(("path", "body"), CASES)
def test_a_client_s_request_is_answered(server: Served, path: str, body: dict[str, Any]) -> None:
    has_limit = {"max_tokens", "max_completion_tokens"} & body.keys()
    reply = server.post(path, {"model": "demo", **body, **({} if has_limit else {"max_tokens": 8})})
    assert reply.status == 200, reply.body
    if body.get("stream"):
        assert b"event: error" not in reply.body
        assert events_of(reply.body)[-1] == "[DONE]"
    else:
        assert reply.json["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sk-unused", "X_Stainless_Lang": "python", "OpenAI_Organization": "org"},
        {"Authorization": "Bearer", "HTTP_Referer": "https://aider.chat", "X_Title": "Aider"},
        {"api_key": "azure-style", "Accept": "text/event-stream", "Accept_Encoding": "gzip, br"},
        {"Content_Type": "application/json; charset=utf-8", "Origin": "vscode-file://vscode-app"},
    ],
    ids=["openai", "aider", "azure", "editor"],
)
def test_a_client_s_headers_are_accepted(server: Served, headers: dict[str, str]) -> None:
    reply = server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 2}, **headers)
    assert reply.status == 200, reply.body
