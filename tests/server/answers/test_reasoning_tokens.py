"""Number of an answer's tokens that are reasoning."""

from __future__ import annotations

import pytest
from tests.support.answers import function
from tests.support.constraints import demo_tokenizer, encode

from penstock.server.answers import answer_format
from penstock.server.requests.answer import AnswerFormat

START, REASONING, END, CONTENT = (encode(text) for text in ("<think>", "I think </th", "</think>", "So <think>ing"))
CALL = encode("<tool_call>")


def format_for(parser: str | None) -> AnswerFormat:
    return answer_format(
        tools=[function("f")],
        tool_choice=None,
        parallel_tool_calls=True,
        structured_outputs=None,
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
        reasoning_parser=parser,
        tokenizer=demo_tokenizer(),
    )


@pytest.mark.parametrize(
    ("parser", "prompt", "reasoning", "answer"),
    [
        ("qwen3", [], [*START, *REASONING, *END], CONTENT),
        ("qwen3", [], [*START, *REASONING], []),
        ("qwen3", [], [*START, *REASONING], CALL),
        ("qwen3", START, [*REASONING, *END], [*CONTENT, *END]),
        ("qwen3", [*START, *END], [], []),
        ("deepseek_r1", [], [*REASONING, *END], CONTENT),
        ("deepseek_r1", [], REASONING, []),
        (None, [], [], [*START, *REASONING, *END]),
    ],
)
def test_reasoning_ends_with_its_marker(
    parser: str | None, prompt: list[int], reasoning: list[int], answer: list[int]
) -> None:
    assert format_for(parser).num_reasoning_tokens(prompt, [*reasoning, *answer]) == len(reasoning)
