"""Chat templates of many kinds: the text is what Transformers renders."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ChatTemplateError
from penstock.templates.chat_template import ChatTemplate, render_chat
from penstock.templates.renderer import TemplateRenderer
from support.fake_engine import byte_level_tokenizer, write_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be <kind> & brief. "},
    {"role": "user", "content": "What is “5 < 6”?\n日本語 😀"},
    {"role": "assistant", "content": "Let me look.", "reasoning": "They want a truth value.", "name": None},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "compare", "arguments": {"a": 5, "b": 6.5, "c": "é"}}}
        ],
    },
    {"role": "tool", "name": "compare", "tool_call_id": "1", "content": '{"less": true}'},
    {"role": "user", "content": "Thanks!"},
]
UNFINISHED = [*MESSAGES, {"role": "assistant", "content": "It is true, since  "}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "compare",
            "description": "Compares <two> numbers & says 'less'",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
        },
    }
]
DOCUMENTS = [{"title": "Ordering", "text": "Five is less than six."}, {"title": "More", "text": "…"}]

# A format with tools, as Qwen's models have.
TAGGED = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(last_query=-1, is_open=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.is_open and message.role == "user" %}
        {%- set ns.last_query = (messages|length - 1) - loop.index0 %}
        {%- set ns.is_open = false %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if message.reasoning_content is string and loop.index0 < ns.last_query %}
            {{- '<think>' + message.reasoning_content.strip('\\n') + '</think>' }}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if call.function %}
                    {%- set call = call.function %}
                {%- endif %}
                {{- '<tool_call>{"name": "' + call.name + '", "arguments": ' }}
                {%- if call.arguments is string %}
                    {{- call.arguments }}
                {%- else %}
                    {{- call.arguments | tojson }}
                {%- endif %}
                {{- '}</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# Stripped contents, defaults of tools and dates, as Llama's models have.
STRIPPED = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if 'tool_calls' in message %}
        {%- for name, value in message.tool_calls[0].function.arguments.items() %}
            {{- name ~ '=' ~ value|string }}
        {%- endfor %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- message.content | tojson }}
    {%- else %}
        {{- '<|' + message['role'] + '|>\\n\\n' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n\\n' }}
{%- endif %}
"""
# Documents, macros, marked answers and every helper there is.
HELPERS = """{% macro show(document, level=1) %}
{{ '#' * level }} {{ document.title|e }}: {{ document['text']|upper }}
{% endmacro %}
{% if documents %}
    {% for document in documents %}
{{ show(document, level=loop.index) }}
    {% endfor %}
{% endif %}
{% set seen = dict(one=1) %}
{% for message in messages %}
    {% if message.role == 'tool' %}{% break %}{% endif %}
    {% if message.role == 'assistant' %}
<a>{% generation %}{{ message.content }}{{ message.thinking }}{% endgeneration %}</a>
    {% else %}
{{ message.role|title }}: {{ message.content }} {{ message.name is defined }} {{ message.items()|list|length }}
    {% endif %}
{% endfor %}
{% for message in messages[:-1] %}
{{ loop.cycle('a', 'b') }}{{ message|tojson(sort_keys=true, separators=(',', ':')) }}
{% endfor %}
{{ messages[-1].content }}{{ seen }} {{ dict.fromkeys(['k'], 1) }}
{{ (3, none, true, 1.5) }} {{ tools }} {{ mood|default('none') }}
{{ add_generation_prompt }}{{ 7 // 2 }}{{ "%05.1f"|format(2.25) }}{{ [3, 1]|sort }}
{{ messages|map(attribute='role')|join(',') }}
"""
TEMPLATES = {"tagged": TAGGED, "stripped": STRIPPED, "helpers": HELPERS}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


def rendered(
    renderer: TemplateRenderer, oracle: Any, source: str, messages: list[dict[str, Any]], **options: Any
) -> str:
    options = {"add_generation_prompt": False, **options}
    template = ChatTemplate(source, "The template")
    return render_chat(renderer, template, messages, oracle.special_tokens_map, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"tools": TOOLS},
        {"tools": TOOLS, "add_generation_prompt": True, "variables": {"enable_thinking": False, "mood": "calm"}},
        {"variables": {"documents": DOCUMENTS, "date_string": "1 May", "custom_tools": TOOLS, "eos_token": "</end>"}},
        {"continue_final_message": True},
        {"continue_final_message": True, "tools": TOOLS, "variables": {"documents": DOCUMENTS}},
    ],
)
def test_the_text_is_what_transformers_renders(
    renderer: TemplateRenderer, oracle: Any, name: str, options: dict[str, Any]
) -> None:
    continues = options.get("continue_final_message", False)
    messages = copy.deepcopy(UNFINISHED if continues else MESSAGES)
    told = {key: value for key, value in options.items() if key != "variables"} | options.get("variables", {})
    expected = oracle.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **told)
    assert rendered(renderer, oracle, TEMPLATES[name], messages, **options) == expected
    assert len(expected) > 100
    assert messages == (UNFINISHED if continues else MESSAGES)


@pytest.mark.parametrize(
    ("source", "last", "message"),
    [
        ("{{ messages[0].content }}", {"role": "user", "content": "the end"}, "does not render it as it is: 'the end'"),
        ("{{ messages[-1].content|upper }}", {"role": "user", "content": "the end"}, "does not render it as it is"),
        ("{{ messages[-1].content }}", {"role": "user", "tool_calls": []}, "that has none"),
        ("{{ messages|length }}", {"role": "user", "content": "the end"}, "the template uses no content"),
    ],
)
def test_a_last_message_that_cannot_be_continued_is_refused_as_by_transformers(
    renderer: TemplateRenderer, oracle: Any, source: str, last: dict[str, Any], message: str
) -> None:
    messages = [*MESSAGES, last]
    with pytest.raises(ChatTemplateError, match=message):
        rendered(renderer, oracle, source, messages, continue_final_message=True)
    with pytest.raises(ValueError, match="continue_final_message"):
        oracle.apply_chat_template(messages, chat_template=source, tokenize=False, continue_final_message=True)


@pytest.mark.parametrize("filters", ["", "|trim"])
def test_a_last_message_that_is_shown_twice_ends_with_itself(
    renderer: TemplateRenderer, oracle: Any, filters: str
) -> None:
    source = "{{ messages|length }}" + ("{{ messages[-1].content" + filters + " }}-") * 2
    messages = [{"role": "user", "content": "the end"}]
    assert rendered(renderer, oracle, source, messages, continue_final_message=True) == "1the end-the end"


@pytest.mark.parametrize(
    "source",
    [
        "{{ namespace(_a=1) }}",
        "{% set a = namespace() %}{% set a._b = 1 %}",
        "{{ messages.append(3) }}",
        "{{ dict.mro }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__class__.__base__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages[0].pop('role') }}",
        "{{ {1, 2} }}",
        "{% generation %}{{ messages }}",
        "{% break %}",
    ],
)
def test_the_sandbox_is_that_of_transformers(renderer: TemplateRenderer, oracle: Any, source: str) -> None:
    """Transformers raises nothing for some unsafe accesses, and hides their values."""
    try:
        expected = oracle.apply_chat_template(MESSAGES, chat_template=source, tokenize=False)
    except Exception:
        with pytest.raises(ChatTemplateError, match="^The template cannot render"):
            rendered(renderer, oracle, source, MESSAGES)
    else:
        assert rendered(renderer, oracle, source, MESSAGES) == expected


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
# As gpt-oss's template takes the messages with calls.
ONE_TEXT = """{%- for message in messages %}
    {%- if message.tool_calls and message.content and message.thinking %}
        {{- raise_exception("Cannot pass both content and thinking") }}
    {%- elif message.content and message.thinking %}
        {{- "final " + message.content }}
    {%- else %}
        {{- "analysis " + (message.content or message.thinking) }}
    {%- endif %}
{%- endfor %}"""


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": "I look.", "tool_calls": CALLS}, "analysis Hm.\n\nI look."),
        ({"content": "", "tool_calls": CALLS}, "analysis Hm."),
        ({"content": "Yes."}, "final Yes."),
    ],
)
def test_a_template_that_takes_one_text_beside_calls_gets_reasoning_and_content_as_one(
    renderer: TemplateRenderer, oracle: Any, name: str, fields: dict[str, Any], expected: str
) -> None:
    messages = [{"role": "assistant", name: "Hm.", **fields}]
    assert rendered(renderer, oracle, ONE_TEXT, messages) == expected
