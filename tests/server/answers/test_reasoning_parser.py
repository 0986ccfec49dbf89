"""Reasoning parsers: reasoning, content and calls of one answer, however it is split."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.answers import Answer, function, parsed, patient, split, tools
from tests.support.constraints import demo_tokenizer, encode

from penstock.config.reasoning import REASONING_PARSERS
from penstock.server.answers import answer_format
from penstock.server.answers.reasoning import ReasoningParser
from penstock.server.answers.tool_parsers import HERMES
from penstock.server.requests.answer import AnswerParser, ContentDelta, PlainAnswer, ReasoningDelta

TEXTS = st.lists(st.sampled_from(["<", "think", ">", "</", "[", "THINK]", "<tool", "\n", " ", "a"]), max_size=8)
TEXTS = TEXTS.map("".join)
CUTS = st.lists(st.integers(0, 1000), max_size=20)


def plain() -> AnswerParser:
    return PlainAnswer().parser([])


def parser_for(reasoning_parser: str | None, prompt: str = "", **fields: object) -> AnswerParser:
    given = {"tools": None, "tool_choice": None, "parallel_tool_calls": True, "structured_outputs": None, **fields}
    format = answer_format(
        **given,  # type: ignore[arg-type]
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
        reasoning_parser=reasoning_parser,
        tokenizer=demo_tokenizer(),
    )
    return format.parser(encode(prompt))


@pytest.mark.parametrize("name", REASONING_PARSERS)
@patient
@given(reasoning=TEXTS, content=TEXTS, cuts=CUTS)
def test_reasoning_and_content_are_those_of_the_text_however_it_is_split(
    name: str, reasoning: str, content: str, cuts: list[int]
) -> None:
    markers = REASONING_PARSERS[name]
    assume(markers.end not in reasoning and not reasoning.lstrip().startswith(markers.start))
    text = f"{markers.start}\n{reasoning}\n{markers.end}\n\n{content}"
    expected = Answer(reasoning.strip(), content.lstrip(), [])
    for reasons in (True, False):
        assert parsed(ReasoningParser(markers, plain(), reasons=reasons), split(text, cuts)) == expected


@patient
@given(text=TEXTS, cuts=CUTS, reasons=st.booleans())
def test_any_text_is_parsed_alike_at_once_and_in_pieces(text: str, cuts: list[int], reasons: bool) -> None:
    markers = REASONING_PARSERS["qwen3"]

    def parse(pieces: list[str]) -> Answer:
        answer = HERMES.parser(tools("f"), parallel=True)
        return parsed(ReasoningParser(markers, answer, reasons=reasons, answer_begins=("<tool_call>",)), pieces)

    assert parse(split(text, cuts)) == parse([text])


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("deepseek_r1", "Hi", "Hm.</think>Yes.", Answer("Hm.", "Yes.", [])),
        ("deepseek_r1", "Hi<think>\n", "Hm.</think>Yes.", Answer("Hm.", "Yes.", [])),
        ("deepseek_r1", "Hi<think>\n\n</think>\n\n", "Yes.", Answer("", "Yes.", [])),
        ("deepseek_r1", "Hi", "Hm.", Answer("Hm.", "", [])),
        ("qwen3", "Hi", "Yes.", Answer("", "Yes.", [])),
        ("qwen3", "Hi", "<think>\nHm.\n</think>\n\nYes.", Answer("Hm.", "Yes.", [])),
        ("qwen3", "Hi", "<thi", Answer("", "<thi", [])),
        ("qwen3", "Hi<think>\n", "Hm.\n</think>\n\nYes.", Answer("Hm.", "Yes.", [])),
        ("qwen3", "<think>Hm.</think>Yes.<|user|>Why?", "<think></think>So.", Answer("", "So.", [])),
        ("mistral", "Hi", "[THINK]Hm.[/THINK]Yes.", Answer("Hm.", "Yes.", [])),
        ("granite", "Hi", "Here is my thought process: Hm. Here is my response: Yes.", Answer("Hm.", "Yes.", [])),
        ("custom", "Hi", "<think>Hm.</think>Yes.", Answer("Hm.", "Yes.", [])),
    ],
)
def test_the_prompt_and_the_text_tell_where_reasoning_is(name: str, prompt: str, text: str, expected: Answer) -> None:
    assert parsed(parser_for(name, prompt), [text]) == parsed(parser_for(name, prompt), list(text)) == expected


def test_calls_behind_reasoning_are_read() -> None:
    text = 'Hm.</think>\n\nI look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    parser = parser_for("deepseek_r1", tools=[function("f")])
    assert parsed(parser, list(text)) == Answer("Hm.", "I look.", [("f", '{"a": 1}')])


def test_a_call_within_reasoning_ends_it_with_qwen3_if_there_are_tools() -> None:
    text = '<think>Hm.\n<tool_call>{"name": "f"}</tool_call>'
    assert parsed(parser_for("qwen3", tools=[function("f")]), list(text)) == Answer("Hm.", "", [("f", "{}")])
    assert parsed(parser_for("qwen3"), list(text)) == Answer('Hm.\n<tool_call>{"name": "f"}</tool_call>', "", [])


def test_reasoning_comes_at_once_up_to_what_may_begin_its_end() -> None:
    parser = parser_for("deepseek_r1")
    assert parser.push("a < b </thi") == [ReasoningDelta("a < b")]
    assert parser.push("s") == [ReasoningDelta(" </this")]
    assert parser.push("</think>") == []
    assert parser.push("c") == [ContentDelta("c")]
