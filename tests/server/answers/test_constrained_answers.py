"""Constraints of answers, on the demo model: whatever is sampled parses, and follows the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tests.support.answers import Answer, function, parsed
from tests.support.constraints import END, demo_tokenizer, encode
from tests.support.harmony import ADDED, harmony_tokenizer, write_harmony_model

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.server.answers import answer_format
from penstock.server.answers.tool_format import ToolFormat
from penstock.server.answers.tool_parsers import register_tool_parser
from penstock.server.requests.answer import AnswerFormat

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["celsius", "é\n"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {"at": {"type": "object", "properties": {"x": {"type": ["null", "boolean"]}}}},
}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "nested": NESTED}
TOOLS = [function("weather", WEATHER, strict=True), function("nested", NESTED)]
NAMED = {"type": "function", "function": {"name": "weather"}}
PARSERS = [None, "hermes", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v31"]
NUM_SEEDS = 6
# Begins with a name that the demo model writes often.
PLAY = ToolFormat(head='KING{"name": "{name}", "arguments": ', tail="}END", openers=("KING",), closers=("END",))
SPECIAL = ToolFormat(
    head="<|user|>{name}<|system|>", tail="", openers=("<|user|>",), skipped=("<|system|>",), bare_names=True
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo") as llm:
        yield llm


@pytest.fixture(autouse=True)
def plug_ins() -> None:
    register_tool_parser("play", lambda _: PLAY)
    register_tool_parser("special", lambda _: SPECIAL)


def format_for(**fields: Any) -> AnswerFormat:
    given = {
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "structured_outputs": None,
        "tool_call_parser": "hermes",
        "enable_auto_tool_choice": True,
        "reasoning_parser": None,
        "tokenizer": demo_tokenizer(),
    }
    return answer_format(**{**given, **fields})


def answers(llm: LLM, format: AnswerFormat, prompt: str = "KING:\n", **params: Any) -> list[tuple[Answer, str]]:
    """Answers of several seeds at temperature 1, and why they ended."""
    sampling = [
        SamplingParams(
            structured_outputs=format.structured_outputs,
            skip_special_tokens=format.skip_special_tokens,
            seed=seed,
            **{"max_tokens": 300, **params},
        )
        for seed in range(NUM_SEEDS)
    ]
    outputs = llm.generate([prompt] * NUM_SEEDS, sampling, use_tqdm=False)
    return [
        (parsed(format.parser(output.prompt_token_ids or []), [completion.text]), str(completion.finish_reason))
        for output in outputs
        for completion in output.outputs
    ]


def check_calls(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("tool_choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.each_value_quick
def test_an_answer_that_must_be_a_call_is_one_valid_call(llm: LLM, parser: str | None, tool_choice: Any) -> None:
    for answer, reason in answers(llm, format_for(tool_call_parser=parser, tool_choice=tool_choice)):
        assert reason == "stop"
        assert answer.content == ""
        assert len(answer.calls) == 1
        assert tool_choice == "required" or answer.calls[0][0] == "weather"
        check_calls(answer.calls)


@pytest.mark.parametrize("parser", PARSERS)
def test_parallel_calls_are_all_valid(llm: LLM, parser: str | None) -> None:
    format = format_for(tool_call_parser=parser, tool_choice="required", parallel_tool_calls=True)
    # Without many ends, so that calls follow each other.
    found = answers(llm, format, logit_bias={END: -6.0}, max_tokens=250)
    assert any(len(answer.calls) > 1 for answer, _ in found)
    for answer, reason in found:
        assert answer.content == ""
        check_calls(answer.calls if reason == "stop" else answer.calls[:-1])


def test_a_named_function_is_called_once_though_parallel_calls_are_allowed(llm: LLM) -> None:
    for answer, reason in answers(llm, format_for(tool_choice=NAMED, parallel_tool_calls=True)):
        assert (reason, len(answer.calls)) == ("stop", 1)


def test_free_text_goes_on_as_a_valid_call_behind_the_marker(llm: LLM) -> None:
    format = format_for(tool_call_parser="play")
    # Favours the letters of the marker.
    bias = dict.fromkeys(encode("KING"), 4.0)
    found = answers(llm, format, "Good evening.", logit_bias=bias, max_tokens=400)
    ended = [answer for answer, reason in found if answer.calls and reason == "stop"]
    assert ended
    assert any(answer.content for answer in ended)
    for answer in ended:
        check_calls(answer.calls)


def test_a_marker_that_is_a_special_token_is_sampled_and_read_as_that_token(llm: LLM) -> None:
    format = format_for(tool_call_parser="special")
    found = answers(llm, format, logit_bias=dict.fromkeys(encode("<|user|>"), 15.0), max_tokens=400)
    ended = [answer for answer, reason in found if answer.calls and reason == "stop"]
    assert not format.skip_special_tokens
    assert ended
    for answer in ended:
        assert "<|" not in answer.content
        check_calls(answer.calls)


def test_without_strict_tools_free_text_is_not_constrained() -> None:
    assert format_for(tools=[function("nested", NESTED)]).structured_outputs is None


def test_a_strict_tool_beside_one_whose_schema_cannot_be_enforced_is_constrained(llm: LLM) -> None:
    other = function("other", {"properties": {"a": {"not": {"pattern": "a"}}}})
    format = format_for(tools=[TOOLS[0], other], tool_call_parser="play")
    for answer, reason in answers(llm, format, logit_bias=dict.fromkeys(encode("KING"), 4.0)):
        check_calls([call for call in answer.calls if call[0] == "weather"] if reason == "stop" else [])


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
def test_an_answer_of_a_given_form_is_a_call_or_has_that_form(llm: LLM, parser: str) -> None:
    content = StructuredOutputsParams(regex="[a-c]{3}")
    found = answers(llm, format_for(tool_call_parser=parser, structured_outputs=content))
    for answer, reason in found:
        assert reason == "stop"
        assert bool(answer.calls) != (len(answer.content) == 3 and set(answer.content) <= set("abc"))
        check_calls(answer.calls)


def test_an_answer_without_calls_by_choice_has_the_given_form(llm: LLM) -> None:
    content = StructuredOutputsParams(choice=("yes", "no"))
    for answer, _ in answers(llm, format_for(tool_choice="none", structured_outputs=content)):
        assert answer.content in ("yes", "no")


def test_the_subset_of_allowed_tools_is_kept(llm: LLM) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("nested")]}}
    for answer, _ in answers(llm, format_for(tool_choice=choice)):
        assert [name for name, _ in answer.calls] == ["nested"]


@pytest.mark.one_case_quick
@pytest.mark.parametrize("opened", [True, False], ids=["opened by the prompt", "opened by the answer"])
@pytest.mark.parametrize("parser", ["hermes", "mistral", None])
def test_reasoning_is_free_and_the_calls_behind_it_are_valid(opened: bool, parser: str | None) -> None:
    format = format_for(tool_call_parser=parser, tool_choice="required", reasoning_parser="qwen3")
    prompt = "KING:\n<think>\n" if opened else "KING:\n"
    with LLM("demo", reasoning_parser="qwen3") as llm:
        found = answers(llm, format, prompt, thinking_token_budget=12, max_tokens=400)
    assert any(answer.reasoning for answer, _ in found) or not opened
    for answer, reason in found:
        assert reason == "stop"
        assert answer.content == ""
        assert len(answer.calls) == 1
        check_calls(answer.calls)


@pytest.fixture(scope="module")
def harmony_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_harmony_model(tmp_path_factory.mktemp("model"))
    with LLM(str(model), reasoning_parser="openai_gptoss") as llm:
        yield llm


CONTENT = StructuredOutputsParams(regex="[a-c]{3}")


@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None, "tool_choice": None, "structured_outputs": CONTENT},
        {"tool_choice": "required"},
        {"structured_outputs": CONTENT},
    ],
    ids=["form", "required", "form or call"],
)
def test_harmony_messages_are_constrained_and_end(harmony_llm: LLM, fields: dict[str, Any], budget: int) -> None:
    names = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    format = format_for(**fields, **names, tokenizer=harmony_tokenizer())
    # Analysis is often chosen, and spelt as gpt-oss does.
    bias = {ADDED["analysis"]: 12.0, ADDED["final"]: 9.0}
    params: dict[str, Any] = {"logit_bias": bias, "thinking_token_budget": budget, "max_tokens": 200}
    found = answers(harmony_llm, format, "KING:\n<|start|>assistant", **params)
    assert [reason for _, reason in found] == ["stop"] * NUM_SEEDS
    for answer, _ in found:
        assert budget or not answer.reasoning
        assert "<|" not in answer.content + answer.reasoning
        is_content = len(answer.content) == 3 and set(answer.content) <= set("abc")
        assert is_content != (len(answer.calls) == 1)
        check_calls(answer.calls)
