"""The parser of a model's calls is found by its template: one written for each family, in the form of its calls."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.answers import function
from tests.support.constraints import demo_tokenizer

from penstock.config.reasoning import HARMONY
from penstock.contract import SamplingParams
from penstock.engine.inputs.conversation import render_prompt
from penstock.server.answers.template_tools import TemplateTools, template_tools
from penstock.server.chat_model import ChatModel
from penstock.server.options import ServerOptions
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.requests.conversation import render_request

# A template's calls: what begins an answer, what is before all calls, one call, what is behind all.
Form = tuple[str, str, str, str]
CHATML = "<|im_start|>assistant\n"
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
PARAMETERS = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
TAGGED = f"<tool_call>\n{OBJECT}\n</tool_call>"
DEEPSEEK = ("<｜Assistant｜>", "<｜tool▁calls▁begin｜>")
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
PAIRS = "{% for k, v in f.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %}"
FORMS: dict[str, tuple[str | None, Form]] = {
    "Hermes, Qwen2.5": ("hermes", (CHATML, "", f"\n{TAGGED}", "<|im_end|>")),
    "Qwen3": ("hermes", (CHATML, "<think>\n\n</think>\n\n", f"\n{TAGGED}", "<|im_end|>")),
    "Granite 4": ("hermes", ("<|start_of_role|>assistant<|end_of_role|>", "", TAGGED, "<|end_of_text|>")),
    "Qwen3-Coder": (
        "qwen3_coder",
        (
            CHATML,
            "",
            "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n{{ v }}"
            "\n</parameter>\n{% endfor %}</function>\n</tool_call>",
            "<|im_end|>",
        ),
    ),
    "Llama 3": ("llama3_json", ("<|start_header_id|>assistant<|end_header_id|>\n\n", "", PARAMETERS, "<|eot_id|>")),
    "Llama 4": (
        "llama4_json",
        ("<|header_start|>assistant<|header_end|>\n\n", "<|python_start|><|python_end|>", PARAMETERS, "<|eot|>"),
    ),
    "Pythonic Llama 4": (
        "llama4_pythonic",
        (
            "<|header_start|>assistant<|header_end|>\n\n",
            "<|python_start|>[",
            f"{{{{ f.name }}}}({PAIRS})",
            "]<|python_end|><|eot|>",
        ),
    ),
    "Mistral": (
        "mistral",
        ("", "[TOOL_CALLS] [", '{{ (f | tojson)[:-1] }}, "id": "{{ c.id }}"}', "]</s>"),
    ),
    "Mistral 3": ("mistral", ("", "", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", "</s>")),
    "DeepSeek V3": (
        "deepseek_v3",
        (
            *DEEPSEEK,
            # Arguments are taken for text.
            DEEPSEEK_CALL.format("function<｜tool▁sep｜>{{ f.name + '\n```json\n' + f.arguments + '\n```' }}"),
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        ),
    ),
    "DeepSeek V3.1": (
        "deepseek_v31",
        (
            *DEEPSEEK,
            DEEPSEEK_CALL.format("{{ f.name + '<｜tool▁sep｜>' + f.arguments }}"),
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        ),
    ),
    "gpt-oss": (
        "openai",
        (
            "<|start|>assistant",
            "",
            " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>",
            "",
        ),
    ),
    "xLAM": ("xlam", (CHATML, "[", OBJECT, "]<|im_end|>")),
    "Phi-4-mini": ("phi4_mini_json", ("<|assistant|>", "<|tool_call|>[", OBJECT, "]<|/tool_call|><|end|>")),
    "Granite 3": (
        "granite",
        ("<|start_of_role|>assistant<|end_of_role|>", "<|tool_call|>[", OBJECT, "]<|end_of_text|>"),
    ),
}
UNKNOWN: dict[str, Form] = {
    "GLM": ("<|assistant|>\n", "", "<tool_call>{{ f.name }}\n<arg_key>word</arg_key></tool_call>", ""),
    "Kimi": (
        "<|im_assistant|>",
        "<|tool_calls_section_begin|>",
        "functions.{{ f.name }}:0{{ f.arguments | tojson }}",
        "",
    ),
}


def template_of(form: Form, *, shows_tools: bool = True) -> str:
    begin, first, call, last = form
    calls = f"{begin}{first}{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{{% endfor %}}{last}"
    turn = f"{{% if m.tool_calls %}}{calls}{{% else %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{{% endif %}}"
    tools = "{{ tools | tojson if tools }}" if shows_tools else ""
    return f"{tools}{{% for m in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}{begin}{{% endif %}}"


@pytest.mark.parametrize("shows_tools", [True, False], ids=["tools", "no tools"])
@pytest.mark.parametrize("family", FORMS)
def test_the_parser_of_a_family_is_found(family: str, shows_tools: bool) -> None:
    parser, form = FORMS[family]
    found = template_tools(demo_tokenizer(), template_of(form, shows_tools=shows_tools), HARMONY)
    assert found == TemplateTools(are_told=not shows_tools, has_known_calls=True, parser=parser)


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_form_without_a_parser_is_told_from_others(family: str) -> None:
    found = template_tools(demo_tokenizer(), template_of(UNKNOWN[family]))
    assert found == TemplateTools(are_told=False, has_known_calls=False)


def test_harmony_needs_the_parser_of_its_reasoning() -> None:
    _, form = FORMS["gpt-oss"]
    assert not template_tools(demo_tokenizer(), template_of(form), "qwen3").has_known_calls


def test_tools_are_told_in_the_form_of_earlier_calls() -> None:
    template = template_of(FORMS["DeepSeek V3"][1], shows_tools=False)
    model = ChatModel(
        demo_tokenizer(), ServerOptions(served_model_name=("x",), chat_template=template), SamplingParams()
    )
    fields = {"model": "x", "messages": [{"role": "user", "content": "?"}], "tools": [function("f", {})]}
    text = str(render_request(model, ChatCompletionRequest.model_validate(fields))["prompt"])
    assert "in this form:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>FUNCTION\n" in text


def test_a_template_may_take_arguments_for_text() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": {"word": "füchse"}}}
    calling: Any = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = template_of(FORMS["DeepSeek V3.1"][1])
    rendered = render_prompt(demo_tokenizer(), calling, chat_template=template, add_generation_prompt=False)
    assert 'look_up<｜tool▁sep｜>{"word": "füchse"}<' in str(rendered["prompt"])
