"""Tools, calls and results in plain messages, for templates without a variable `tools`."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tests.support.answers import function, parsed
from tests.support.constraints import demo_tokenizer

from penstock.engine.inputs.conversation import render_prompt
from penstock.errors import InvalidRequest
from penstock.server.answers.template_tools import TemplateTools, template_tools
from penstock.server.answers.tool_format import CallableTool
from penstock.server.answers.tool_parsers import JSON_LIST, tool_call_format, tool_parser_names
from penstock.templates.told_tools import plain_calls, tools_text
from penstock.text.tokenizer import load_tokenizer
from support.chat_templates import GEMMA_LIKE, TOOL_TEMPLATE, WITHOUT_TOOLS

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [function("weather", SCHEMA, description="Of a city", strict=True)]
TOLD = tools_text(TOOLS, plain_calls)
USER = {"role": "user", "content": "Rome?"}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Röm"}'}}
TOOL_STEPS: list[Any] = [
    USER,
    {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "21"},
    {"role": "tool", "content": "22"},
    {"role": "user", "content": "So?"},
]
WRITTEN = '[{"name": "weather", "parameters": {"city": "Röm"}}]'


def rendered(messages: list[Any], template: str | None, **options: Any) -> str:
    return str(render_prompt(demo_tokenizer(), messages, chat_template=template, **options)["prompt"])


def test_the_text_has_what_a_model_must_know() -> None:
    described, form = TOLD.splitlines()[1], TOLD.splitlines()[-1]
    assert json.loads(described) == {"name": "weather", "description": "Of a city", "parameters": SCHEMA}
    assert json.loads(form) == [{"name": "FUNCTION", "parameters": {"PARAMETER": "VALUE"}}]
    assert plain_calls([("f", '{"a": 1}'), ("g", "{}")]) == JSON_LIST.written([("f", '{"a": 1}'), ("g", "{}")])


@pytest.mark.parametrize(
    ("messages", "template", "expected"),
    [
        ([USER], WITHOUT_TOOLS, f"<|system|>{TOLD}<|end|><|user|>Rome?<|end|>"),
        (
            [{"role": "system", "content": "Be kind."}, USER],
            WITHOUT_TOOLS,
            f"<|system|>Be kind.\n\n{TOLD}<|end|><|user|>Rome?<|end|>",
        ),
        ([USER], GEMMA_LIKE, f"<user>{TOLD}\n\nRome?\n"),
        (TOOL_STEPS, GEMMA_LIKE, f"<user>{TOLD}\n\nRome?\n<model>Hm.\n{WRITTEN}\n"),
    ],
    ids=["system", "with a system message", "user", "user, and calls"],
)
def test_tools_are_told_where_the_template_shows_them(messages: list[Any], template: str, expected: str) -> None:
    assert expected in rendered(messages, template, tools=TOOLS)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
def test_calls_and_results_are_plain_messages(tools: Any) -> None:
    text = rendered(TOOL_STEPS, WITHOUT_TOOLS, tools=tools)
    results = "Result of weather: 21\nResult: 22\nSo?"
    assert text.endswith(f"<|assistant|>Hm.\n{WRITTEN}<|end|><|user|>{results}<|end|><|assistant|>")


def test_templates_that_show_calls_but_no_tools_show_their_history() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}"
    )
    text = rendered(TOOL_STEPS, template, tools=TOOLS)
    assert text.startswith(f"system: {TOLD};")
    assert "tool: 21;" in text
    assert '"id": "a"' in text


def test_templates_with_tools_get_them_as_before() -> None:
    assert "You can call" not in rendered([USER], TOOL_TEMPLATE, tools=TOOLS)


def test_a_template_that_shows_neither_system_nor_user_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="There are 1 tools, but the given chat template has no variable `tools`"):
        rendered([USER], "{{ messages[0].role }}{{ content }}", tools=TOOLS)


def test_the_log_says_once_that_tools_are_told(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(demo_tokenizer().folder)
    with caplog.at_level(logging.WARNING, "penstock"):
        for _ in range(2):
            render_prompt(tokenizer, [USER], chat_template=WITHOUT_TOOLS, tools=TOOLS)
    tokenizer.close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "The given chat template has no variable `tools`"
    ]


@pytest.mark.parametrize("name", [None, *(name for name in tool_parser_names() if name != "openai")])
def test_each_parser_reads_the_form_that_is_told(name: str | None) -> None:
    format = tool_call_format(name, demo_tokenizer())
    text = rendered([USER], WITHOUT_TOOLS, tools=TOOLS, write_calls=format.written)
    assert format.written([("FUNCTION", '{"PARAMETER": "VALUE"}')]) in text
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    tools = [CallableTool("weather", {"type": "object", "properties": properties})]
    calls = [("weather", '{"city": "Röm", "days": 3}'), ("weather", '{"city": "x"}')]
    assert parsed(format.parser(tools, parallel=True), [format.written(calls)]).calls == calls


def test_a_plain_call_may_have_no_list() -> None:
    text = '{"name": "weather", "arguments": {"city": "x"}}'
    parser = JSON_LIST.parser([CallableTool("weather", SCHEMA)], parallel=True)
    assert parsed(parser, [text]).calls == [("weather", '{"city": "x"}')]
    assert parsed(JSON_LIST.parser([], parallel=True), [text]).content == text


CALL_BEGINS = "{{ '' if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
CALL_ENDS = "<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("name", "reasoning"),
    [
        *((name, "") for name in (None, *tool_parser_names()) if name != "openai"),
        *((name, "<think>\n\n</think>\n\n") for name in ("hermes", "qwen3_coder", "deepseek_v31")),
    ],
)
def test_the_parser_is_that_which_reads_what_the_template_writes(name: str | None, reasoning: str) -> None:
    call = ("look_up", '{"word": "fox"}')
    written = tool_call_format(name, demo_tokenizer()).written([call])
    begin = CALL_BEGINS + reasoning
    end = CALL_ENDS.replace("<assistant>", "<assistant><think>") if reasoning else CALL_ENDS
    shown = template_tools(demo_tokenizer(), f"{begin}{{% raw %}}{written}{{% endraw %}}{end}")
    assert (shown.are_told, shown.has_known_calls) == (False, True)
    assert tool_call_format(shown.parser, demo_tokenizer()).written([call]) == written


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, TemplateTools(are_told=False, has_known_calls=True)),
        (WITHOUT_TOOLS, TemplateTools(are_told=True, has_known_calls=True)),
        (TOOL_TEMPLATE, TemplateTools(are_told=False, has_known_calls=False)),
        ("{% if tools %}{% endif %}{{ raise_exception('no') }}", TemplateTools(are_told=False, has_known_calls=False)),
        (
            CALL_BEGINS
            + '[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}, "id": "{{ c.id }}"}]'
            + "{% endfor %}"
            + CALL_ENDS,
            TemplateTools(are_told=False, has_known_calls=True, parser="mistral"),
        ),
    ],
    ids=["demo", "no tools", "calls of its own", "refuses calls", "calls with ids"],
)
def test_a_template_is_asked_what_it_knows_of_tools(template: str | None, expected: TemplateTools) -> None:
    assert template_tools(demo_tokenizer(), template) == expected


def test_the_demo_model_shows_tools_and_results() -> None:
    text = rendered(TOOL_STEPS, None, tools=TOOLS)
    assert text.startswith("<|begin|><|system|>You can call these functions:\n{")
    assert '"Of a city"' in text
    assert f"<|assistant|>Hm.\n{WRITTEN}<|end|><|user|>Result of weather: 21<|end|>" in rendered(
        [*TOOL_STEPS[:2], {**TOOL_STEPS[2], "name": "weather"}], None, tools=TOOLS
    )
