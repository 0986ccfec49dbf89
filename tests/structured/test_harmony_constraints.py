"""Constraints of harmony messages: they begin with the text that they concern, whatever header the model writes."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np
import pytest

from penstock.contract import StructuredOutputsParams
from penstock.server.answers.constraint import constraint
from penstock.server.answers.harmony import HARMONY
from penstock.server.answers.tool_choice import read_tool_choice
from penstock.structured.harmony import HarmonyBackend, HarmonyGrammar, HarmonyMatcher
from penstock.structured.harmony_messages import HarmonyTokens, read_header, split_message
from support.answers import function
from support.constraints import tokens_of
from support.harmony import ADDED, ENDS, VOCAB_SIZE, encode, harmony_backend, harmony_tokenizer

OPENED = "<|start|>assistant"
HM = "<|channel|>analysis<|message|>Hm.<|end|>"
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [function("f", PARAMETERS, strict=True), function("f2", PARAMETERS, strict=True)]
LETTERS = StructuredOutputsParams(regex="ab+")
FINALS = [
    "<|channel|>final<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
    "<|channel|>final<|constrain|>JSON<|message|>",
    "<|channel|>final json<|message|>",
]
CALLS = [
    "<|channel|>commentary to=functions.f2 <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.f2<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.f2 json<|message|>",
    "<|channel|>commentary to=functions.f2<|message|>",
    "<|channel|>analysis to=functions.f2 code<|message|>",
    " to=functions.f2<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.f2<|channel|>analysis<|message|>",
]


def for_tools(tool_choice: str, content: StructuredOutputsParams | None = None) -> StructuredOutputsParams:
    choice = read_tool_choice(TOOLS, tool_choice)
    params = constraint(HARMONY, choice, content, parallel=True, follows_reasoning=False)
    assert params is not None
    return params


@functools.cache
def grammar_for(params: StructuredOutputsParams) -> HarmonyGrammar:
    backend = HarmonyBackend(harmony_backend(), HarmonyTokens.of(harmony_tokenizer()), VOCAB_SIZE, ENDS)
    return backend.compile(params)


def matcher_for(params: StructuredOutputsParams, prompt: str = OPENED) -> HarmonyMatcher:
    return grammar_for(params).start(encode(prompt))


def follow(matcher: HarmonyMatcher, text: str) -> None:
    """Take in a text, each token of which may come."""
    for token_id in encode(text):
        assert token_id in allowed(matcher), (text, harmony_tokenizer().decode([token_id], skip_special_tokens=False))
        assert matcher.accept([token_id]) == 1


def allowed(matcher: HarmonyMatcher) -> list[int]:
    words = np.zeros(VOCAB_SIZE // 32, np.int32)
    matcher.fill(words)
    return tokens_of(words, VOCAB_SIZE)


def may_end(matcher: HarmonyMatcher) -> bool:
    may = set(ENDS) <= set(allowed(matcher))
    assert may or not set(ENDS) & set(allowed(matcher))
    return may


def refuses(matcher: HarmonyMatcher, text: str) -> bool:
    token_ids = encode(text)
    num_accepted = matcher.accept(token_ids)
    matcher.rollback(num_accepted)
    return num_accepted < len(token_ids)


@pytest.mark.parametrize("before", ["", f"{HM}{OPENED}", f"{HM}{OPENED}{HM}{OPENED}"], ids=["at once", "1", "2"])
@pytest.mark.parametrize("header", FINALS)
def test_the_final_message_is_constrained_from_its_first_token_on(header: str, before: str) -> None:
    matcher = matcher_for(LETTERS)
    follow(matcher, before + header)
    assert {harmony_tokenizer().decode([token]) for token in allowed(matcher)} == {"a", "ab"}
    follow(matcher, "ab")
    assert may_end(matcher)
    assert matcher.accept([ENDS[0]]) == 1
    assert matcher.is_terminated


@pytest.mark.parametrize("before", ["", f"{HM}{OPENED}"], ids=["at once", "behind analysis"])
@pytest.mark.parametrize(
    "params",
    [for_tools("required"), for_tools("auto"), for_tools("auto", LETTERS)],
    ids=["required", "auto", "auto with a form"],
)
@pytest.mark.parametrize("header", CALLS)
def test_a_call_is_constrained_in_every_form_of_its_header(
    header: str, params: StructuredOutputsParams, before: str
) -> None:
    matcher = matcher_for(params)
    follow(matcher, before + header)
    assert refuses(matcher, '{"y"')
    assert refuses(matcher, "[")
    assert not may_end(matcher)
    follow(matcher, '{"x": 1}')
    assert may_end(matcher)


def test_headers_name_what_the_constraint_allows() -> None:
    matcher = matcher_for(for_tools("required"))
    for header in (
        OPENED,
        "<|channel|>commentary to=functions.g",
        "<|channel|>commentary to=python",
        "<|channel|>other",
        "<|channel|>commentary<|message|>",
        "<|message|>",
        "Yes",
    ):
        assert refuses(matcher, header), header
    follow(matcher, "<|channel|>final<|message|>")
    assert allowed(matcher) == [ADDED["<|start|>"]], "only a call can follow"
    # Comments to the user stand beside calls, but not where the content has a form.
    follow(matcher_for(for_tools("auto")), f"<|channel|>commentary<|message|>I look.<|end|>{OPENED}{CALLS[0]}")
    assert refuses(matcher_for(LETTERS), "<|channel|>commentary<|message|>")
    assert refuses(matcher_for(LETTERS), "<|channel|>commentary to=functions.f2")


@pytest.mark.parametrize(
    "params", [LETTERS, for_tools("required"), for_tools("auto")], ids=["form", "required", "auto"]
)
def test_analysis_is_free_and_an_end_is_always_in_reach(params: StructuredOutputsParams) -> None:
    matcher = matcher_for(params)
    follow(matcher, "<|channel|>analysis<|message|>a {")
    markers = {ADDED[name] for name in ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")}
    assert set(range(VOCAB_SIZE)) - set(allowed(matcher)) == {*markers, *ENDS}
    assert matcher.accept([ENDS[0]]) == 0
    # A thinking budget forces the final message.
    matcher.accept(encode("<|start|>"))
    assert refuses(matcher, f"assistant{HM}")
    follow(matcher, f"assistant{FINALS[0]}")


@pytest.mark.parametrize(
    ("prompt", "text", "is_free"),
    [
        ("Who?", "", False),
        ("", HM + OPENED + FINALS[0], False),
        (f"{OPENED}<|channel|>", "final<|message|>", False),
        (f"{OPENED}<|channel|>analysis<|message|>We see", " it", True),
        (f"{OPENED}<|channel|>analysis<|message|>", "", True),
        (f"{OPENED}<|channel|>final<|message|>", "", False),
        (f"{OPENED}<|channel|>final<|message|>x", "ab", False),
        (f"{OPENED}{FINALS[0]}ab<|end|>", HM + OPENED + FINALS[1], False),
        ("<|start|>user<|message|>Who?", FINALS[0], False),
    ],
)
def test_a_prompt_may_open_a_message(prompt: str, text: str, is_free: bool) -> None:
    matcher = matcher_for(LETTERS, prompt)
    follow(matcher, text)
    assert (len(allowed(matcher)) > 1000) == is_free
    assert not is_free or not may_end(matcher)


def test_a_tag_for_calls_that_the_constraint_cannot_begin_with_is_content() -> None:
    begin = "<|start|>assistant<|channel|>commentary to=functions.f<|message|>"
    call = {"type": "tag", "begin": begin, "content": {"type": "regex", "pattern": "b"}, "end": ""}
    format = {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, call]}
    matcher = matcher_for(StructuredOutputsParams(structural_tag=json.dumps({"format": format})))
    assert refuses(matcher, "<|channel|>commentary to=")
    follow(matcher, f"{FINALS[0]}a{begin}b")
    assert may_end(matcher)


@pytest.mark.parametrize("params", [LETTERS, for_tools("required"), for_tools("auto", LETTERS)], ids=["1", "2", "3"])
def test_tokens_that_are_taken_back_leave_no_trace(params: StructuredOutputsParams) -> None:
    """Against matchers that never took any back."""
    rng = random.Random(7)
    texts = [HM, OPENED, "<|start|>", *FINALS, *CALLS, "ab", '{"x": 1}', "<|end|>", "<|channel|>"]
    num_tried = 0
    for _ in range(12):
        matcher, output = matcher_for(params), list[int]()
        for _ in range(12):
            drafts = encode(rng.choice(texts)) if rng.random() < 0.8 else [rng.choice(allowed(matcher))]
            num_accepted = matcher.accept(drafts)
            output += drafts[:num_accepted]
            num_back = rng.randint(0, len(output)) if rng.random() < 0.4 else 0
            matcher.rollback(num_back)
            del output[len(output) - num_back :]
            if rng.random() < 0.3:
                other = matcher_for(params)
                assert other.accept(output) == len(output)
                assert allowed(other) == allowed(matcher)
                num_tried += 1
    assert num_tried > 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("assistant<|channel|>analysis to=functions.f code", ("", "functions.f", "analysis")),
        ("<|start|>assistant to=functions.a.b-c<|channel|>commentary", ("assistant", "functions.a.b-c", "commentary")),
        ("<|channel|>commentary functions.f json", ("", "functions.f", "commentary")),
        ("<|channel|>finale", ("", "", "final")),
        ("<|start|>user", ("user", "", "")),
        ("", ("", "", "")),
    ],
)
def test_headers_are_read_by_their_parts(text: str, expected: Any) -> None:
    assert read_header(text) == expected


def test_a_message_without_its_marker_is_split_behind_the_parts_of_its_header() -> None:
    assert split_message("<|channel|>final <|constrain|>json{}") == (("", "", "final"), "{}")
    assert split_message("<|channel|>analysis to=functions.f code x") == (("", "functions.f", "analysis"), " x")
    assert split_message("Yes") == (("", "", ""), "Yes")
