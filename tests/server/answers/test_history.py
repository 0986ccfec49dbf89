"""Messages of clients in the form that chat templates read."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.constraints import demo_tokenizer

from penstock.engine.inputs.conversation import render_prompt
from penstock.errors import InvalidRequest
from penstock.server.answers.history import template_messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": {"b": 1}}'}}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}, {{ m.name }}, {{ m.reasoning_content }}, {{ m.content }}]"
    "{% for c in m.tool_calls %}[{{ c.type }} {{ c.function.name }} {{ c.function.arguments.a.b }}]{% endfor %}"
    "{% endfor %}"
)


def test_a_conversation_with_calls_is_rendered() -> None:
    call = {name: value for name, value in CALL.items() if name != "type"}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    rendered = render_prompt(demo_tokenizer(), template_messages(messages), chat_template=TEMPLATE)
    assert rendered["prompt"] == "[system, , , Be brief.][assistant, , Hm., ][function f 1][tool, f, , 2]"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_comes_under_both_names(name: str) -> None:
    (message,) = template_messages([{"role": "assistant", "content": "Yes.", name: "Hm."}])
    assert (message["reasoning"], message["reasoning_content"]) == ("Hm.", "Hm.")


def test_empty_calls_and_reasoning_are_left_out() -> None:
    message = {"role": "assistant", "content": "Yes.", "tool_calls": [], "reasoning": "", "refusal": None}
    assert template_messages([message]) == [{"role": "assistant", "content": "Yes."}]


@pytest.mark.parametrize(
    ("message", "at"),
    [
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, r"messages\[0\].tool_calls\[0\]"),
        ({"role": "assistant", "tool_calls": "f()"}, r"messages\[0\].tool_calls="),
        ({"role": "tool", "content": "2"}, r"messages\[0\].tool_call_id="),
        ("Hi", r"messages\[0\] is 'Hi'"),
    ],
)
def test_what_templates_cannot_read_is_refused_with_its_place(message: Any, at: str) -> None:
    with pytest.raises(InvalidRequest, match=at):
        template_messages([message])
