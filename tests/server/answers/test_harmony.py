"""Answers of gpt-oss: reasoning, content and calls of their messages, however the text is split."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.answers import Answer, parsed, patient, split, tools
from tests.support.constraints import demo_tokenizer, encode

from penstock.server.answers import answer_format
from penstock.server.requests.answer import AnswerFormat, AnswerParser

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
COMMENTARY = "<|start|>assistant<|channel|>commentary"
CALL = f'{COMMENTARY} to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>'
CUTS = st.lists(st.integers(0, 1000), max_size=20)


@functools.cache
def format_for(tool_choice: str | None) -> AnswerFormat:
    given = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    return answer_format(
        tools=None if tool_choice is None else given,
        tool_choice=tool_choice,
        parallel_tool_calls=True,
        structured_outputs=None,
        tool_call_parser="openai",
        enable_auto_tool_choice=True,
        reasoning_parser="openai_gptoss",
        tokenizer=demo_tokenizer(),
    )


def parser_for(prompt: str = "", tool_choice: str | None = "auto") -> AnswerParser:
    return format_for(tool_choice).parser(encode(prompt))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.<|return|>", Answer("Hm.", "Yes.", [])),
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes", Answer("Hm.", "Yes", [])),
        (f"{ANALYSIS}Hm", Answer("Hm", "", [])),
        (f"{ANALYSIS}Hm.<|end|><|start|>assist", Answer("Hm.", "", [])),
        ("<|channel|>final<|message|>a < b <|x|>", Answer("", "a < b <|x|>", [])),
        ("Yes.", Answer("", "Yes.", [])),
        (f"{ANALYSIS}Hm.<|end|>{CALL}", Answer("Hm.", "", [("f", '{"a": 1}')])),
        (f"{ANALYSIS}Hm.<|end|>{CALL.removesuffix('<|call|>')}", Answer("Hm.", "", [("f", '{"a": 1}')])),
        (f"{ANALYSIS}Hm.<|end|>{CALL}{CALL}", Answer("Hm.", "", [("f", '{"a": 1}')] * 2)),
        (
            f"{COMMENTARY}<|message|>I look.<|end|><|start|>assistant to=functions.g<|channel|>commentary json"
            "<|message|>{}<|call|>",
            Answer("", "I look.", [("g", "{}")]),
        ),
        (f"{COMMENTARY} to=python code<|message|>1 + 1<|call|>", Answer("1 + 1", "", [])),
        (f"{ANALYSIS}One.<|end|><|start|>assistant{ANALYSIS} Two.<|end|>{FINAL}So.", Answer("One. Two.", "So.", [])),
    ],
)
@settings(patient, max_examples=25)
@given(cuts=CUTS)
def test_messages_are_reasoning_content_and_calls(text: str, expected: Answer, cuts: list[int]) -> None:
    assert parsed(parser_for(), split(text, cuts)) == expected


def test_a_prompt_may_open_the_analysis() -> None:
    prompt = f"<|start|>assistant{ANALYSIS}"
    assert parsed(parser_for(prompt), [f"Hm.<|end|>{FINAL}Yes."]) == Answer("Hm.", "Yes.", [])


def test_calls_that_are_required_have_no_content() -> None:
    text = f"{ANALYSIS}Hm.<|end|>{COMMENTARY}<|message|>I look.<|end|>{CALL}"
    assert parsed(parser_for(tool_choice="required"), [text]) == Answer("Hm.", "", [("f", '{"a": 1}')])
    assert parsed(parser_for(tool_choice=None), [f"{ANALYSIS}Hm.<|end|>{FINAL}Yes."]) == Answer("Hm.", "Yes.", [])


def test_calls_are_written_as_they_are_read() -> None:
    from penstock.server.answers.harmony import HARMONY

    written = HARMONY.written([("f", '{"a": 1}')])
    assert parsed(HARMONY.parser(tools("f"), parallel=True), [written]) == Answer("", "", [("f", '{"a": 1}')])
