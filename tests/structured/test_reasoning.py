"""Constraints behind reasoning: after any tokens, the next ones are those that the tokens alone say."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.config.reasoning import ReasoningMarkers
from penstock.contract import StructuredOutputsParams
from penstock.structured.reasoning import (
    ReasoningBackend,
    ReasoningMatcher,
    after_last,
    other_spellings,
    reasoning_tokens,
)
from support.constraints import (
    END,
    NUM_WORDS,
    VOCAB_SIZE,
    allowed_tokens,
    demo_backend,
    demo_tokenizer,
    encode,
    matcher_for,
    tokens_of,
)

# Markers of one token, of several, of tokens that the constraint allows too, and one that begins like itself.
ONE = ReasoningMarkers("<|user|>", "<|assistant|>")
SEVERAL = ReasoningMarkers("<think>", "</think>")
AT_ONCE = ReasoningMarkers("<think>", "</think>", starts_in_reasoning=True)
ALIKE = ReasoningMarkers("121", "112")
# Ended by what the constraint may begin with, too, by what it may not, and by what is a part of another marker.
IMPLIED = ReasoningMarkers("<|user|>", "</think>", implied_ends=("<|assistant|>", "<1"))
IMPLIED_ALIKE = ReasoningMarkers("121", "112", starts_in_reasoning=True, implied_ends=("1x", "<<", "<<1"))
KINDS = [ONE, SEVERAL, AT_ONCE, ALIKE, IMPLIED, IMPLIED_ALIKE]
REGEX = "[<0-9]{3,8}"
# How an end may be spelt otherwise, because tokens of the text around it are shared.
OTHER_ENDS = {SEVERAL: ["</think!", "1</think!"], IMPLIED: ["2</think"]}


def spelt(markers: ReasoningMarkers) -> tuple[list[int], list[int]]:
    return encode(markers.start), encode(markers.end)


def matcher_of(
    markers: ReasoningMarkers, prompt: Sequence[int] = (), regex: str = REGEX, vocab_size: int = VOCAB_SIZE
) -> ReasoningMatcher:
    tokens = reasoning_tokens(demo_tokenizer(), markers)
    tokens = replace(tokens, other_ends=tuple(tuple(encode(text)) for text in OTHER_ENDS.get(markers, [])))
    backend = ReasoningBackend(demo_backend(), tokens, vocab_size, [END])
    return backend.compile(StructuredOutputsParams(regex=regex)).start(prompt)


FREE = [token for token in range(VOCAB_SIZE) if token != END]


def oracle(markers: ReasoningMarkers, output: Sequence[int], opened: Sequence[int] | None) -> list[int]:
    """Oracle of the allowed tokens: replays every token from the first on.

    opened: what the prompt has behind the start of its reasoning; None where it has begun none.
    """
    start, end = spelt(markers)
    output = list(output)
    if opened is not None:
        reasoning, offset = [*opened, *output], len(opened)
    elif markers.starts_in_reasoning:
        reasoning, offset = output, 0
    elif output[: len(start)] == start:
        reasoning, offset = output[len(start) :], -len(start)
    else:
        allowed = constrained(output)
        return sorted({*allowed, start[len(output)]}) if start[: len(output)] == output else allowed
    implied = [encode(text) for text in markers.implied_ends]
    ends = [end, *map(encode, OTHER_ENDS.get(markers, []))]
    for position in range(1, len(reasoning) + 1):
        if any(reasoning[:position][-len(one) :] == one for one in ends):
            return constrained(output[position - offset :])
        for marker in implied:
            begin = position - len(marker)
            is_output = begin >= (0 if opened is None else len(opened))
            if is_output and reasoning[begin:position] == marker and is_begin(marker):
                return constrained(output[begin - offset :])
    return FREE


def is_begin(token_ids: Sequence[int]) -> bool:
    """Whether the constraint may begin with these tokens."""
    return matcher_for(regex=REGEX).accept(token_ids) == len(token_ids)


def constrained(token_ids: Sequence[int]) -> list[int]:
    matcher = matcher_for(regex=REGEX)
    return allowed_tokens(matcher) if matcher.accept(token_ids) == len(token_ids) else []


@pytest.mark.parametrize("markers", KINDS, ids=str)
@pytest.mark.parametrize("opened", [None, "", "so 1", "so </think 11"], ids=repr)
@pytest.mark.one_case_quick
def test_whatever_is_taken_in_and_back_the_next_tokens_are_those_that_the_tokens_say(
    markers: ReasoningMarkers, opened: str | None
) -> None:
    rng = random.Random(f"{markers} {opened}")
    start, end = spelt(markers)
    behind = None if opened is None else encode(opened)
    prompt = encode("Who are you?") if behind is None else [*encode("Who are you?"), *start, *behind]
    num_constrained = 0
    for _ in range(12):
        matcher, output = matcher_of(markers, prompt), list[int]()
        for _ in range(14):
            drafts: list[int] = []
            for _ in range(rng.randint(0, 6)):
                allowed = oracle(markers, [*output, *drafts], behind)
                # Markers, a part of them, what goes on from one, what is allowed, and what is not.
                known = [*output, *drafts][-len(end) :]
                going_on = [end[number] for number in range(len(end)) if known[len(known) - number :] == end[:number]]
                others = [*markers.implied_ends, *OTHER_ENDS.get(markers, [])]
                implied = [token for text in others for token in encode(text)]
                pool = [
                    *going_on,
                    *start,
                    *end,
                    *implied,
                    *rng.sample(allowed, min(3, len(allowed))),
                    END,
                    *encode("<12"),
                ]
                drafts.append(rng.choice(pool))
                if rng.random() < 0.1:
                    drafts += rng.choice([end, *map(encode, OTHER_ENDS.get(markers, []))])
            expected_taken = 0
            while expected_taken < len(drafts):
                if drafts[expected_taken] not in oracle(markers, [*output, *drafts[:expected_taken]], behind):
                    break
                expected_taken += 1
            assert matcher.accept(drafts) == expected_taken
            output += drafts[:expected_taken]
            assert allowed_tokens(matcher) == oracle(markers, output, behind)
            taken_back = rng.randint(0, min(len(output), 9)) if rng.random() < 0.7 else 0
            matcher.rollback(taken_back)
            output = output[: len(output) - taken_back]
            expected = oracle(markers, output, behind)
            assert allowed_tokens(matcher) == expected
            num_constrained += expected not in (FREE, [END])
    assert num_constrained > 5, "constraints were reached"


def test_a_tool_call_ends_reasoning_where_it_may_come_and_is_a_part_of_the_answer() -> None:
    backend = ReasoningBackend(demo_backend(), reasoning_tokens(demo_tokenizer(), IMPLIED), VOCAB_SIZE, [END])
    tag = {"structures": [{"begin": "<1", "schema": {"type": "integer"}, "end": ">"}], "triggers": ["<1"]}
    tagged = backend.compile(StructuredOutputsParams(structural_tag=tag)).start()
    for token_id in encode("<|user|>hm <1"):
        assert tagged.accept([token_id]) == 1
    assert END not in allowed_tokens(tagged)
    assert tagged.accept(encode("5>")) == 2
    assert END in allowed_tokens(tagged)
    closed = backend.compile(StructuredOutputsParams(json_object=True)).start()
    assert closed.accept(encode("<|user|>hm <1")) == len(encode("<|user|>hm <1"))
    assert allowed_tokens(closed) == FREE


def test_a_tool_call_of_an_earlier_answer_has_ended_its_reasoning() -> None:
    matcher = matcher_of(IMPLIED, encode("<|user|>hm <1 2> and a question"))
    assert allowed_tokens(matcher) != FREE


@pytest.mark.parametrize(
    ("prompt", "may_reason", "is_free"),
    [
        ("Hello", True, False),
        ("Hello<|user|>", False, True),
        ("Hello<|user|>\n", False, True),
        ("Hello<|user|> hm<|assistant|>\n\n", False, False),
        ("Hello<|user|> hm<|assistant|>An answer<|begin|>Another question", True, False),
        ("Hello<|user|> hm<|assistant|><|begin|>", True, False),
        ("<|user|>a<|assistant|>b<|user|>", False, True),
    ],
)
def test_a_prompt_says_whether_reasoning_has_begun_or_ended(prompt: str, may_reason: bool, is_free: bool) -> None:
    allowed = allowed_tokens(matcher_of(ONE, encode(prompt)))
    start, end = (token for (token,) in spelt(ONE))
    assert (end in allowed) == is_free
    assert (start in allowed) == (may_reason or is_free)
    at_once = allowed_tokens(matcher_of(ONE._replace(starts_in_reasoning=True), encode(prompt)))
    assert (end in at_once) == (may_reason or is_free)


def test_reasoning_does_not_end_an_output_and_the_mask_ends_with_the_vocabulary() -> None:
    matcher = matcher_of(AT_ONCE, vocab_size=VOCAB_SIZE - 7)
    words = np.zeros(NUM_WORDS, np.int32)
    matcher.fill(words)
    assert tokens_of(words) == [token for token in FREE if token < VOCAB_SIZE - 7]
    assert matcher.accept([END]) == 0
    assert not matcher.is_terminated


def test_behind_the_marker_the_constraint_ends_the_output() -> None:
    matcher = matcher_of(ONE, regex="1")
    token_ids = [*encode("<|user|>so<|assistant|>1"), END]
    assert matcher.accept(token_ids) == len(token_ids)
    assert matcher.is_terminated
    matcher.rollback(2)
    assert not matcher.is_terminated
    assert allowed_tokens(matcher) == encode("1")


def test_the_last_of_a_marker_is_found_whole() -> None:
    assert after_last([1, 2, 1, 2, 3], [1, 2]) == 4
    assert after_last([2, 1], [1, 2]) == -1
    assert after_last([], [1]) == -1


def test_a_marker_that_shares_tokens_with_the_text_around_it_is_found() -> None:
    vocabulary = ["</", ".</", "think", ">", ">\n", ">\n\n", "\n"]

    def encode_greedily(text: str) -> list[int]:
        pieces = re.findall("|".join(map(re.escape, sorted(vocabulary, key=len, reverse=True))) + "|(?s:.)", text)
        return [vocabulary.index(piece) if piece in vocabulary else 100 + ord(piece) for piece in pieces]

    bare = tuple(encode_greedily("</think>"))
    found = {bare, *other_spellings(encode_greedily, "</think>")}
    assert found == {(first, 2, last) for first in (0, 1) for last in (3, 4, 5)}
    for text in ("so</think>", "so.</think>\n\n", "so </think>\n{", "so.</think>{"):
        token_ids = encode_greedily(text)
        assert max(after_last(token_ids, one) for one in found) > 0, text
    assert other_spellings(lambda text: [5] if text == "<t>" else [100, 5, 101], "<t>") == ()


def test_a_prompt_that_opens_reasoning_with_another_spelling_has_opened_it() -> None:
    tokens = replace(reasoning_tokens(demo_tokenizer(), SEVERAL), other_starts=(tuple(encode("<think!")),))
    backend = ReasoningBackend(demo_backend(), tokens, VOCAB_SIZE, [END])
    grammar = backend.compile(StructuredOutputsParams(regex=REGEX))
    assert allowed_tokens(grammar.start(encode("Who?<think!"))) == FREE
    assert allowed_tokens(grammar.start(encode("Who?<think?"))) != FREE
