"""Answers of gpt-oss: reasoning, content and calls of their messages, however the text is split."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.answers import Answer, parsed, patient, split, tools
from tests.support.constraints import demo_tokenizer
from tests.support.harmony import encode, harmony_tokenizer

from penstock.errors import InvalidParameter
from penstock.server.answers import answer_format
from penstock.server.requests.answer import AnswerFormat, AnswerParser

ANALYSIS = "<|channel|>analysis<|message|>"
HM = f"{ANALYSIS}Hm.<|end|>"
WORDS = "a word " * 90
FINAL = "<|start|>assistant<|channel|>final<|message|>"
COMMENTARY = "<|start|>assistant<|channel|>commentary"
CALL = f'{COMMENTARY} to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>'
CALLED = ("f", '{"a": 1}')
CUTS = st.lists(st.integers(0, 1000), max_size=20)


FIELDS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "structured_outputs": None,
    "tool_call_parser": "openai",
    "enable_auto_tool_choice": True,
    "reasoning_parser": "openai_gptoss",
    "tokenizer": harmony_tokenizer(),
}


@functools.cache
def format_for(tool_choice: str | None) -> AnswerFormat:
    return answer_format(**{**FIELDS, "tool_choice": tool_choice, **({} if tool_choice else {"tools": None})})


# As every chat template of the format ends a prompt.
OPENED = "<|start|>assistant"


def parser_for(prompt: str = OPENED, tool_choice: str | None = "auto") -> AnswerParser:
    return format_for(tool_choice).parser(encode(prompt))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HM}{FINAL}Yes.<|return|>", Answer("Hm.", "Yes.", [])),
        (f"{HM}{FINAL}Yes", Answer("Hm.", "Yes", [])),
        (f"{ANALYSIS}Hm", Answer("Hm", "", [])),
        (f"{HM}<|start|>assist", Answer("Hm.", "", [])),
        ("<|channel|>final<|message|>a < b <|x|>", Answer("", "a < b <|x|>", [])),
        ("Yes.", Answer("", "Yes.", [])),
        (f"{HM}{CALL}", Answer("Hm.", "", [("f", '{"a": 1}')])),
        (f"{HM}{CALL.removesuffix('<|call|>')}", Answer("Hm.", "", [("f", '{"a": 1}')])),
        (f"{HM}{CALL}{CALL}", Answer("Hm.", "", [("f", '{"a": 1}')] * 2)),
        (
            f"{COMMENTARY}<|message|>I look.<|end|><|start|>assistant to=functions.g<|channel|>commentary json"
            "<|message|>{}<|call|>",
            Answer("", "I look.", [("g", "{}")]),
        ),
        (f"{COMMENTARY} to=python code<|message|>1 + 1<|call|>", Answer("1 + 1", "", [])),
        (f"{ANALYSIS}One.<|end|><|start|>assistant{ANALYSIS} Two.<|end|>{FINAL}So.", Answer("One. Two.", "So.", [])),
        # Orders and words of headers that the model is known to write.
        ("<|channel|>final <|constrain|>json<|message|>{}", Answer("", "{}", [])),
        ("<|channel|>final json<|message|>{}<|end|>", Answer("", "{}", [])),
        (' to=functions.f<|channel|>commentary <|constrain|>json<|message|> {"a": 1} \n', Answer("", "", [CALLED])),
        ('<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": 1}', Answer("", "", [CALLED])),
        ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}', Answer("", "", [CALLED])),
        ('<|channel|>commentary? to=functions.f <|constrain|>json<|message|>{"a": 1}', Answer("", "", [CALLED])),
        (
            f"{HM}<|start|>assistant to=functions.f<|channel|>analysis<|message|>",
            Answer("Hm.", "", [("f", "{}")]),
        ),
        ("<|channel|>commentary to=user<|message|>I look.", Answer("", "I look.", [])),
        (f"{ANALYSIS}Hm.<|start|>assistant<|channel|>final<|message|>Yes.", Answer("Hm.", "Yes.", [])),
        (f"{ANALYSIS}Hm.<|channel|>final<|message|>Yes.", Answer("Hm.", "Yes.", [])),
        (f"{HM}<|start|>assistantassistant<|channel|>final<|message|>Yes.", Answer("Hm.", "Yes.", [])),
        (f"{HM}<|start|><|start|>assistant<|channel|>final<|message|>Yes.", Answer("Hm.", "Yes.", [])),
        (f"{ANALYSIS}<|message|>Hm.<|end|> 364 {FINAL}Yes.<|end|>\n", Answer("Hm.364 ", "Yes.", [])),
        # Messages that are no answer: of others, and of tools that are not functions.
        (f"{CALL}<|start|>functions.f to=assistant<|channel|>commentary<|message|>5", Answer("5", "", [CALLED])),
        # Headers without a message, or without a name.
        ("<|channel|><|message|>Yes.", Answer("", "Yes.", [])),
        ("<|message|>Yes.", Answer("", "Yes.", [])),
        ("Yes, json.<|return|>", Answer("", "Yes, json.", [])),
        (
            f"<|channel|>analysis We need {'a word ' * 90}<|end|>{FINAL}Yes.",
            Answer(f"We need {'a word ' * 90}", "Yes.", []),
        ),
        (f"{HM}<|start|>assistant<|channel|>final 4 < 5.", Answer("Hm.", "4 < 5.", [])),
        ("<|channel|>final<|constrain|>json{}<|return|>", Answer("", "{}", [])),
        ('<|channel|>commentary to=functions.f <|constrain|>json{"a": 1}<|call|>', Answer("", "", [CALLED])),
        (f"<|channel|>??<|end|>{FINAL}Yes.", Answer("??", "Yes.", [])),
        (
            f"<|channel|>We need it.<|end|><|start|>assistant{HM}{FINAL}Yes.",
            Answer("We need it.Hm.", "Yes.", []),
        ),
        (f"{HM}<|start|>assistant<|channel|>It is 4.<|return|>", Answer("Hm.", "It is 4.", [])),
        (f"<|channel|>commentary to=assistant{HM}{FINAL}Yes.", Answer("Hm.", "Yes.", [])),
        # Headers that are cut off.
        (f"{HM}<|start|>assistant<|channel|>comm", Answer("Hm.", "", [])),
        (f"{HM}<|start|>assistant to", Answer("Hm.", "", [])),
        (f"{COMMENTARY} to=functions.f <|constrain|>js", Answer("", "", [])),
        (f"{COMMENTARY} to=functions.wea", Answer("", "", [])),
        (f"{COMMENTARY} to=", Answer("", "", [])),
        (f"{HM}<|start|>assistant to=", Answer("Hm.", "", [])),
    ],
)
@settings(patient, max_examples=25)
@given(cuts=CUTS)
def test_messages_are_reasoning_content_and_calls(text: str, expected: Answer, cuts: list[int]) -> None:
    assert parsed(parser_for(), split(text, cuts)) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (f"<|start|>assistant{ANALYSIS}", f"Hm.<|end|>{FINAL}Yes.", Answer("Hm.", "Yes.", [])),
        (f"<|start|>assistant{ANALYSIS}We", f" see.<|end|>{FINAL}Yes.", Answer(" see.", "Yes.", [])),
        (FINAL, "Yes.", Answer("", "Yes.", [])),
        (f"{FINAL}The", " end.", Answer("", " end.", [])),
        ("<|start|>assistant<|channel|>", "analysis<|message|>Hm.", Answer("Hm.", "", [])),
        (f"{COMMENTARY} to=functions.f<|message|>", '{"a": 1}', Answer("", "", [CALLED])),
        (f"{FINAL}Yes.<|end|><|start|>user<|message|>And?<|end|>", f"{FINAL}No.", Answer("", "No.", [])),
        ("Who are you?", f"{HM}{FINAL}Yes.", Answer("Hm.", "Yes.", [])),
        ("Who are you?", "Yes.", Answer("", "Yes.", [])),
        ("<|start|>user<|message|>Who are you?", "Yes.", Answer("", "Yes.", [])),
    ],
)
@settings(patient, max_examples=10)
@given(cuts=CUTS)
def test_a_prompt_may_open_a_message(prompt: str, text: str, expected: Answer, cuts: list[int]) -> None:
    assert parsed(parser_for(prompt), split(text, cuts)) == expected


PIECES = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "assistant", "final"]
PIECES += ["analysis", "commentary", " to=functions.f", "json", '{"a": 1}', " ", "Yes.", "x" * 500]


@settings(patient, max_examples=200)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), cuts=CUTS)
def test_any_text_has_one_reading_and_no_marker_in_it(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    whole = parsed(parser_for(), [text])
    assert parsed(parser_for(), split(text, cuts)) == whole
    read = "".join([whole.reasoning, whole.content, *(part for call in whole.calls for part in call)])
    assert not any(marker in read for marker in PIECES[:6])
    # What is for the user is not lost.
    assert text.count("Yes.") >= read.count("Yes.")
    if "<|message|>Yes." in text:
        assert "Yes." in read


def test_the_parts_of_a_message_go_out_as_they_come() -> None:
    parser = parser_for()
    for text in (f"{ANALYSIS}Hm", f"<|end|>{FINAL}Yes"):
        *_, last = parser.push(text)
        assert last.text == text[-len(last.text) :]  # type: ignore[union-attr]
    plain = parser_for()
    assert [event.text for piece in ("Yes", ", I") for event in plain.push(piece)] == ["Yes", ", I"]  # type: ignore[union-attr]


@pytest.mark.parametrize("tool_choice", [None, "auto", "required"])
def test_the_markers_are_kept_in_the_text_with_tools_and_without(tool_choice: str | None) -> None:
    assert not format_for(tool_choice).skip_special_tokens


def test_without_tools_a_call_is_no_content() -> None:
    text = f"{HM}{CALL}"
    assert parsed(parser_for(tool_choice=None), [text]) == Answer('Hm.{"a": 1}', "", [])


def test_further_calls_are_dropped_where_one_is_allowed() -> None:
    format = answer_format(**{**FIELDS, "parallel_tool_calls": False})
    assert parsed(format.parser(encode(OPENED)), [CALL + CALL]) == Answer("", "", [CALLED])


@pytest.mark.parametrize(
    ("prompt", "reasoning", "answer"),
    [
        (OPENED, f"{HM}", f"{FINAL}Yes.<|return|>"),
        (OPENED, "", "<|channel|>final<|message|>Yes."),
        (OPENED, f"{HM}<|start|>assistant{ANALYSIS}So.", FINAL + "Yes."),
        (OPENED, f"{HM}", CALL),
        (OPENED + ANALYSIS, "Hm.<|end|>", FINAL + "Yes."),
        ("Who?", f"{ANALYSIS}Hm", ""),
        ("Who?", "", "Yes."),
    ],
)
def test_reasoning_tokens_are_those_of_its_messages(prompt: str, reasoning: str, answer: str) -> None:
    token_ids = [*encode(reasoning), *encode(answer)]
    assert format_for("auto").num_reasoning_tokens(encode(prompt), token_ids) == len(encode(reasoning))


def test_a_tokenizer_without_the_markers_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"openai_gptoss.*<\|start\|>"):
        answer_format(**{**FIELDS, "tokenizer": demo_tokenizer()})


def test_calls_that_are_required_have_no_content() -> None:
    text = f"{HM}{COMMENTARY}<|message|>I look.<|end|>{CALL}"
    assert parsed(parser_for(tool_choice="required"), [text]) == Answer("Hm.", "", [("f", '{"a": 1}')])
    assert parsed(parser_for(tool_choice=None), [f"{HM}{FINAL}Yes."]) == Answer("Hm.", "Yes.", [])


def test_calls_are_written_as_they_are_read() -> None:
    from penstock.server.answers.harmony import HARMONY

    written = HARMONY.written([("f", '{"a": 1}')])
    assert parsed(HARMONY.parser(tools("f"), parallel=True), [written]) == Answer("", "", [("f", '{"a": 1}')])
