"""Conversations, by chat templates: the prompt is what Transformers renders."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import BaseModel

from penstock import LLM, AsyncEngine, SamplingParams
from penstock.engine.inputs.conversation import render_prompt
from penstock.errors import ChatTemplateError, InvalidParameter, InvalidRequest
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from support.fake_engine import (
    FakeCore,
    byte_level_tokenizer,
    install_fake_core,
    write_model,
    write_tokenizer,
)
from support.leftovers import nothing_left

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<|user|>{{ message.role }}: {{ message.content }}{{ mood or '' }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
OTHER_TEMPLATE = "{% for message in messages %}{{ message.content }};{% endfor %}"
HOSTILE_TEMPLATE = "{{ 1 / 0 }}"
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "the fox"}]
UNFINISHED = [*MESSAGES, {"role": "assistant", "content": "jumps over"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
DOCUMENTS_TEMPLATE = "{% for document in documents %}[{{ document.title }}]{% endfor %}{{ messages[-1].content }}"
DOCUMENTS = [{"title": "Foxes", "text": "They jump."}]
CALL_TEMPLATE = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value|tojson }};{% endfor %}"
    "{% endfor %}{% endfor %}"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"), longest_context=512)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize(
    ("messages", "options", "oracle_options"),
    [
        (MESSAGES, {}, {"add_generation_prompt": True}),
        (MESSAGES, {"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            UNFINISHED,
            {"add_generation_prompt": False, "continue_final_message": True},
            {"continue_final_message": True},
        ),
        (MESSAGES, {"chat_template": OTHER_TEMPLATE}, {"chat_template": OTHER_TEMPLATE}),
        (MESSAGES, {"tools": TOOLS}, {"tools": TOOLS, "add_generation_prompt": True}),
        (MESSAGES, {"tools": []}, {"tools": [], "add_generation_prompt": True}),
        (MESSAGES, {"chat_template_kwargs": {"mood": "!"}}, {"mood": "!", "add_generation_prompt": True}),
        (
            MESSAGES,
            {"chat_template": DOCUMENTS_TEMPLATE, "chat_template_kwargs": {"documents": DOCUMENTS}},
            {"chat_template": DOCUMENTS_TEMPLATE, "documents": DOCUMENTS, "add_generation_prompt": True},
        ),
    ],
)
def test_the_prompt_is_what_transformers_renders(
    tokenizer: Tokenizer, oracle: Any, messages: Any, options: dict[str, Any], oracle_options: dict[str, Any]
) -> None:
    prompt = render_prompt(tokenizer, messages, **options)
    assert prompt["prompt"] == oracle.apply_chat_template(messages, tokenize=False, **oracle_options)
    encoded = oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **oracle_options)
    assert tokenizer.encode(prompt["prompt"], add_special_tokens=False) == encoded


def test_text_parts_are_one_text(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "the fox"}, {"type": "text", "text": "jumps"}]
    whole = render_prompt(tokenizer, [{"role": "user", "content": "the fox\njumps"}])
    assert render_prompt(tokenizer, [{"role": "user", "content": parts}]) == whole


TEXT = {"role": "user", "content": "the fox"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]}
PLAIN = "{% for m in messages %}{{ m.content }};{% endfor %}"
LOOP = "{% for m in messages %}{% for part in m['content'] %}[{{ part.type }} {{ part.text }}]{% endfor %};{% endfor %}"
BOTH = (
    "{% for m in messages %}{% set content = m.content %}{% if content is string %}{{ content }}{% else %}"
    "{%- for part in content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
)
# The name of a content in a condition is no loop over it.
THINKS = "{% for m in messages %}{% if '</think>' in m.content %}!{% endif %}{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content_format", "text"),
    [
        (PLAIN, "auto", "the fox;the\nfox;"),
        (THINKS, "auto", "the fox;the\nfox;"),
        (LOOP, "auto", "[text the fox];[text the][text fox];"),
        (BOTH, "auto", "the fox;[the][fox];"),
        (BOTH, "string", "the fox;the\nfox;"),
        (BOTH, "openai", "[the fox];[the][fox];"),
        (LOOP, "openai", "[text the fox];[text the][text fox];"),
    ],
)
def test_contents_come_as_the_template_takes_them(
    tokenizer: Tokenizer, template: str, content_format: str, text: str
) -> None:
    options: dict[str, Any] = {"chat_template": template, "chat_template_content_format": content_format}
    assert render_prompt(tokenizer, [TEXT, PARTS], **options)["prompt"] == text


def test_a_message_in_parts_can_be_continued(tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render_prompt(tokenizer, [TEXT, PARTS], chat_template=BOTH, **options)["prompt"] == "the fox;[the][fox"


def test_another_format_of_contents_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="chat_template_content_format='html'.*auto, string, openai"):
        render_prompt(tokenizer, [TEXT], chat_template_content_format="html")


def test_a_message_without_content_is_empty(tokenizer: Tokenizer) -> None:
    empty = render_prompt(tokenizer, [{"role": "assistant", "content": ""}])
    assert render_prompt(tokenizer, [{"role": "assistant", "content": None}]) == empty


@pytest.mark.parametrize(
    ("messages", "options", "error", "message"),
    [
        ([], {}, InvalidRequest, "has no messages"),
        (["hello"], {}, InvalidRequest, r"messages\[0\] is 'hello'"),
        ([{"content": "x"}], {}, InvalidRequest, r"messages\[0\].*role"),
        ([*MESSAGES, {"role": 7}], {}, InvalidRequest, r"messages\[2\]"),
        ([{"role": "user", "content": 7}], {}, InvalidRequest, r"messages\[0\].content=7 is a int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            {},
            InvalidRequest,
            r"messages\[0\].content\[0\] of type 'image_url' is an image, which this model does not take",
        ),
        (UNFINISHED, {"continue_final_message": True}, InvalidParameter, "add_generation_prompt=True"),
        (
            MESSAGES,
            {"chat_template_kwargs": {"tools": TOOLS}},
            InvalidParameter,
            "chat_template_kwargs has 'tools', which is an argument of its own",
        ),
        (MESSAGES, {"chat_template_kwargs": {3: True}}, InvalidParameter, "chat_template_kwargs has 3"),
        (MESSAGES, {"chat_template_kwargs": 3}, InvalidParameter, "chat_template_kwargs=3 is not valid"),
        (
            MESSAGES,
            {"chat_template_kwargs": {"mood": object()}},
            InvalidRequest,
            "chat_template_kwargs cannot be given",
        ),
        (MESSAGES, {"chat_template_kwargs": {"mood": "\ud800"}}, InvalidRequest, "'mood'.* lone surrogates"),
        ([{"role": "user", "content": "\ud800"}], {}, InvalidRequest, r"messages\[0\].* lone surrogates"),
        (MESSAGES, {"tools": 3}, InvalidParameter, "tools=3 is not valid"),
        (MESSAGES, {"tools": [3]}, InvalidRequest, r"tools\[0\] is 3"),
        (MESSAGES, {"chat_template": "no/such.jinja"}, InvalidParameter, "'no/such.jinja' is not the path of a file"),
        (MESSAGES, {"chat_template": Path("no/such")}, InvalidParameter, "'no/such' is not the path of a file"),
        (MESSAGES, {"chat_template": "/etc/passwd"}, InvalidParameter, "'/etc/passwd' is no Jinja template"),
        (MESSAGES, {"chat_template": 3}, InvalidParameter, "chat_template=3 is a int"),
        (MESSAGES, {"chat_template": "{{ messages"}, InvalidRequest, "cannot render"),
        (MESSAGES, {"chat_template": "{{ raise_exception('no system') }}"}, InvalidRequest, "no system"),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    tokenizer: Tokenizer, messages: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        render_prompt(tokenizer, messages, **options)


def called(arguments: Any) -> list[dict[str, Any]]:
    calls = [{"type": "function", "id": "1", "function": {"name": "look_up", "arguments": arguments}}]
    return [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}]


@pytest.mark.parametrize("arguments", ['{"word": "fox", "most": 3}', {"word": "fox", "most": 3}])
def test_arguments_of_tool_calls_reach_the_template_as_objects(tokenizer: Tokenizer, arguments: Any) -> None:
    messages = called(arguments)
    assert render_prompt(tokenizer, messages, chat_template=CALL_TEMPLATE)["prompt"] == 'word="fox";most=3;'
    assert messages == called(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        None,
        "{}",
        {},
        '{"word": "fo',
        "word=fox",
        "null",
        "[1]",
        "{} {}",
        '{"a": 1}{"a": 1}',
        "[" * 5000,
        "9" * 5000,
        [1],
        3,
    ],
    ids=lambda arguments: repr(arguments)[:20],
)
def test_arguments_that_are_no_object_are_an_empty_one(tokenizer: Tokenizer, arguments: Any) -> None:
    assert render_prompt(tokenizer, called(arguments), chat_template=CALL_TEMPLATE + "!")["prompt"] == "!"


def test_messages_may_be_objects_of_a_client(tokenizer: Tokenizer) -> None:
    class Function(BaseModel):
        name: str
        arguments: str

    class Call(BaseModel):
        id: str
        function: Function

    class Answer(BaseModel):
        role: str
        tool_calls: list[Call]

    call = Call(id="1", function=Function(name="look_up", arguments='{"word": "fox"}'))
    whole: Any = Answer(role="assistant", tool_calls=[call])
    in_part = {"role": "assistant", "tool_calls": [call]}
    for message in (whole, in_part):
        prompt = render_prompt(tokenizer, [*MESSAGES, message], chat_template=CALL_TEMPLATE)
        assert prompt["prompt"] == 'word="fox";'


def test_a_function_is_described_as_a_tool(tokenizer: Tokenizer) -> None:
    def look_up(word: str) -> str:
        """Look a word up.

        Args:
            word: the word.
        """
        return word

    tools: Any = [look_up]
    assert "[look_up]" in render_prompt(tokenizer, MESSAGES, tools=tools)["prompt"]


# Some are arguments of Transformers.
@pytest.mark.parametrize("name", ["truncation", "padding", "max_length", "conversation", "kwargs", "name"])
def test_every_variable_of_a_template_can_be_given(tokenizer: Tokenizer, name: str) -> None:
    prompt = render_prompt(
        tokenizer, MESSAGES, chat_template="{{ " + name + " }}", chat_template_kwargs={name: "a value"}
    )
    assert prompt["prompt"] == "a value"


def test_a_template_may_be_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    expected = render_prompt(tokenizer, MESSAGES, chat_template=OTHER_TEMPLATE)
    for path in (tmp_path / "other.jinja", tmp_path / "other"):
        path.write_text(OTHER_TEMPLATE)
        assert render_prompt(tokenizer, MESSAGES, chat_template=path) == expected
    assert render_prompt(tokenizer, MESSAGES, chat_template=str(tmp_path / "other.jinja")) == expected
    (tmp_path / "odd.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(InvalidParameter, match=r"odd\.jinja' cannot be read"):
        render_prompt(tokenizer, MESSAGES, chat_template=tmp_path / "odd.jinja")


def test_one_of_several_templates_is_chosen_by_name(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "{{ messages[-1].content }}"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
        {"name": "loud", "template": "{{ messages[-1].content|upper }}"},
    ]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, byte_level_tokenizer(), chat_template=templates))
    assert render_prompt(tokenizer, MESSAGES)["prompt"] == "the fox"
    assert render_prompt(tokenizer, MESSAGES, tools=TOOLS)["prompt"] == "look_up"
    assert render_prompt(tokenizer, MESSAGES, chat_template="loud")["prompt"] == "THE FOX"
    del templates[0]
    other = load_tokenizer(write_tokenizer(tmp_path / "other", byte_level_tokenizer(), chat_template=templates))
    with pytest.raises(InvalidRequest, match="several chat templates and none for all. Give chat_template: 'loud'"):
        render_prompt(other, MESSAGES)


@pytest.fixture
def llm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core()
    with LLM(str(folder), policy="priority") as llm:
        assert isinstance(llm._session._core, FakeCore)
        llm._session._core.max_model_len = 512
        llm._session._input_processor._prompts._max_model_len = 512
        yield llm


def core_of(llm: LLM) -> FakeCore:
    core = llm._session._core
    assert isinstance(core, FakeCore)
    return core


def test_a_conversation_is_answered(llm: LLM, tokenizer: Tokenizer) -> None:
    (output,) = llm.chat(MESSAGES, GREEDY)
    expected = render_prompt(tokenizer, MESSAGES)
    assert output.prompt == expected["prompt"]
    assert output.prompt_token_ids == tokenizer.encode(expected["prompt"], add_special_tokens=False)
    assert type(output.prompt) is str
    assert len(output.outputs[0].token_ids) == 3


def test_a_hostile_template_ends_nothing_but_its_request(llm: LLM) -> None:
    with pytest.raises(ChatTemplateError, match=r"^conversations\[0\]: The given chat template cannot .* ZeroDivision"):
        llm.chat([MESSAGES, MESSAGES], GREEDY, chat_template=HOSTILE_TEMPLATE)
    assert core_of(llm).added == []
    assert llm.chat(MESSAGES, GREEDY)[0].finished


def test_nothing_is_left_of_an_engine_that_has_chatted(llm: LLM, folder: Path) -> None:
    others = set(psutil.Process().children())
    with nothing_left():
        other = LLM(str(folder))
        other.chat(MESSAGES, GREEDY)
        assert set(psutil.Process().children()) - others
        other.close()


def test_an_asynchronous_engine_takes_the_same_options(llm: LLM, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text(CALL_TEMPLATE)
    messages = called('{"word": "fox"}')

    async def answer(engine: AsyncEngine, **options: Any) -> str | None:
        return [output async for output in engine.chat(messages, GREEDY, **options)][-1].prompt

    async def main() -> str | None:
        async with AsyncEngine(str(folder), enable_multiprocessing=False) as engine:
            with pytest.raises(ChatTemplateError, match="ZeroDivision"):
                await answer(engine, chat_template=HOSTILE_TEMPLATE)
            with pytest.raises(InvalidParameter, match="not the path of a file"):
                await answer(engine, chat_template="no/such.jinja")
            return await answer(engine, chat_template=str(tmp_path / "other.jinja"))

    with nothing_left():
        assert asyncio.run(main()) == 'word="fox";'


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    outputs = llm.chat([MESSAGES, MESSAGES[1:]], [GREEDY, SamplingParams(max_tokens=5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    assert len(outputs[1].prompt_token_ids) < len(outputs[0].prompt_token_ids)


def test_a_bad_conversation_is_named_before_any_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"^conversations\[1\]: messages\[0\]"):
        llm.chat([MESSAGES, [{"content": "x"}]])
    with pytest.raises(InvalidRequest, match="messages is a str"):
        llm.chat("hello")  # type: ignore[arg-type]
    assert core_of(llm).added == []


def test_a_model_without_a_template_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core()
    with LLM(str(write_model(tmp_path / "plain"))) as llm:
        with pytest.raises(InvalidRequest, match="no chat template"):
            llm.chat(MESSAGES, GREEDY)
        assert llm.chat(MESSAGES, GREEDY, chat_template=OTHER_TEMPLATE)[0].finished


def test_priorities_reach_the_core(llm: LLM) -> None:
    llm.generate(["a", "b"], GREEDY, priority=[3, -1])
    llm.generate(["a", "b"], GREEDY, priority=7)
    llm.chat([MESSAGES, MESSAGES], GREEDY, priority=[2, 1])
    assert [request.priority for request in core_of(llm).added] == [3, -1, 7, 7, 2, 1]


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1], "priority=.1. is not valid. Allowed: an integer, or a list of 2"),
        ("high", "priority='high'"),
        (True, "priority=True"),
        ([1, 0.5], r"prompts\[1\]: priority=0.5"),
    ],
)
def test_priorities_are_one_integer_per_prompt(llm: LLM, priority: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(["a", "b"], GREEDY, priority=priority)


def test_the_prefix_cache_is_reset(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    assert core_of(llm).num_resets == 1


def test_a_refusal_is_the_text_of_an_answer(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "I cannot."}]
    answers: list[Any] = [
        {"role": "assistant", "content": parts},
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": "Yes.", "refusal": None},
    ]
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    assert (
        render_prompt(tokenizer, answers, chat_template=template)["prompt"] == "[Well.\nI cannot.][I will not.][Yes.]"
    )
