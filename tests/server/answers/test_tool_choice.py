"""Tools and tool choices of requests: accepted forms, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.answers import Answer, function, parsed
from tests.support.constraints import demo_tokenizer

from penstock.contract import StructuredOutputsParams
from penstock.errors import ConfigError, InvalidParameter
from penstock.server.answers import answer_format
from penstock.server.answers.tool_choice import Mode, read_tool_choice
from penstock.server.answers.tool_parsers import load_tool_parser_plugin, tool_parser_names
from penstock.server.requests.answer import AnswerFormat

TOOLS = [function("f"), function("g", {"type": "object"})]
FLAT = {"type": "function", "name": "g", "parameters": {"type": "object"}}


def format_for(**fields: Any) -> AnswerFormat:
    given = {
        "tools": TOOLS,
        "tool_choice": None,
        "parallel_tool_calls": None,
        "structured_outputs": None,
        "tool_call_parser": "hermes",
        "enable_auto_tool_choice": True,
        "reasoning_parser": None,
        "tokenizer": demo_tokenizer(),
    }
    return answer_format(**{**given, **fields})


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function(name) for name in names]}}


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, Mode.AUTO, ["f", "g"]),
        ("none", Mode.NONE, []),
        ("required", Mode.REQUIRED, ["f", "g"]),
        (function("g"), Mode.REQUIRED, ["g"]),
        ({"type": "function", "name": "g"}, Mode.REQUIRED, ["g"]),
        (allowed("required", "g"), Mode.REQUIRED, ["g"]),
        (allowed("auto", "f", "g", "f"), Mode.AUTO, ["f", "g"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [FLAT]}, Mode.AUTO, ["g"]),
    ],
)
@pytest.mark.parametrize("tools", [TOOLS, [TOOLS[0], FLAT]], ids=["chat", "responses"])
def test_choices_of_chat_and_responses_are_read(tools: Any, choice: Any, mode: Mode, names: list[str]) -> None:
    found = read_tool_choice(tools, choice)
    assert (found.mode, [tool.name for tool in found.tools]) == (mode, names)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "any"}, "tool_choice='any' is not valid"),
        ({"tool_choice": function("h")}, "tool_choice names the function 'h', which is not in tools. Allowed: f, g"),
        ({"tool_choice": allowed("required", "h")}, r"tool_choice.allowed_tools.tools\[0\] names the function 'h'"),
        ({"tool_choice": allowed("none", "f")}, "tool_choice.allowed_tools.mode='none'"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice='required' needs tools"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice='auto' needs tools"),
        ({"tools": "f"}, "tools='f' is not valid"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]="),
        ({"tools": [function("f"), function("f")]}, r"tools\[1\] has the name 'f'"),
        ({"tools": [function("a b")]}, r"tools\[0\].function.name='a b'"),
        ({"tools": [{"type": "function", "name": ""}]}, r"tools\[0\].name=''"),
        ({"tools": [function("f", strict="yes")]}, r"tools\[0\].function.strict='yes'"),
        ({"tools": [function("f", {"type": "array"})]}, r"tools\[0\].function.parameters="),
        ({"enable_auto_tool_choice": False}, "--enable-auto-tool-choice"),
        ({"tool_call_parser": "herms"}, "tool_call_parser='herms' is not known. Allowed: .*hermes"),
        ({"reasoning_parser": "qwen4"}, "reasoning_parser='qwen4' is not known. Allowed: .*qwen3"),
        ({"structured_outputs": StructuredOutputsParams(grammar='start: "a"')}, "structured_outputs.grammar"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        format_for(**fields)


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"strict": True}], ids=["required", "strict"])
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(fields: dict[str, Any]) -> None:
    bad = function("g", {"properties": {"a": {"not": {"pattern": "a"}}}}, strict=fields.get("strict"))
    with pytest.raises(InvalidParameter, match=r"^tools\[1\].function.parameters has .*/properties/a/not"):
        format_for(tools=[function("f"), bad], tool_choice=fields.get("tool_choice"))


def test_a_schema_that_cannot_be_enforced_is_accepted_where_nothing_is_promised() -> None:
    assert format_for(tools=[function("f", {"not": {"pattern": "a"}})]).structured_outputs is None


def test_without_tools_the_answer_is_content() -> None:
    parser = format_for(tools=None).parser([])
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parsed(parser, [text]) == Answer("", text, [])


def test_with_the_choice_none_calls_are_content() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parsed(format_for(tool_choice="none").parser([]), [text]) == Answer("", text, [])


PLUG_IN = """
from penstock.server.answers.tool_format import ToolFormat
from penstock.server.answers.tool_parsers import register_tool_parser

register_tool_parser("arrow", lambda tokenizer: ToolFormat(head="=>{name}", tail="", openers=("=>",), bare_names=True))
"""


def test_a_file_adds_a_tool_parser(tmp_path: Path) -> None:
    (tmp_path / "arrow.py").write_text(PLUG_IN)
    load_tool_parser_plugin(tmp_path / "arrow.py")
    assert "arrow" in tool_parser_names()
    parser = format_for(tool_call_parser="arrow").parser([])
    assert parsed(parser, ['Look: =>f{"a": 1}']) == Answer("", "Look:", [("f", '{"a": 1}')])


@pytest.mark.parametrize(("text", "message"), [(None, "is not a Python file"), ("1 / 0", "ZeroDivisionError")])
def test_a_plug_in_that_cannot_be_run_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "plug_in.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tool_parser_plugin(path)
