"""Finish reasons of answers whose calls a stop string or a stop token cuts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.answers import joined, tools

from penstock.engine.output.outputs import CompletionOutput
from penstock.server.answers.pythonic_format import PythonicFormat
from penstock.server.answers.tool_parsers import DEEPSEEK_V3, HERMES, LLAMA3_JSON, MISTRAL
from penstock.server.answers.xml_format import XMLFormat
from penstock.server.protocol.base import GenerationFields
from penstock.server.requests.samples import AnswerSample

_ARGUMENTS = '{"a": [1, {"b": "x}"}], "c": null}'
_OTHERS: dict[str, tuple[Any, str]] = {
    "xml": (XMLFormat(), "<tool_call>\n<function=f>\n<parameter=a>\ntext\n</parameter>\n</function>\n</tool_call>"),
    "pythonic": (PythonicFormat(), '[f(a=[1, {"b": "x)"}], c=None)]'),
}
ANSWERS = {
    name: (format, format.written([("f", _ARGUMENTS)]))
    for name, format in (("hermes", HERMES), ("llama3", LLAMA3_JSON), ("mistral", MISTRAL), ("deepseek", DEEPSEEK_V3))
} | _OTHERS


def ended(format: Any, text: str, finish_reason: str, stop_reason: str | int | None) -> tuple[str | None, list[Any]]:
    """Finish reason and calls of a sample with this text."""
    sample = AnswerSample(0, format.parser(tools("f"), parallel=True), GenerationFields())
    events = sample.push(
        CompletionOutput(index=0, text=text, token_ids=[1], finish_reason=finish_reason, stop_reason=stop_reason)
    )
    return sample.finish_reason, joined(events).calls


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("stop_reason", ["x", 7])
def test_an_answer_that_is_cut_within_a_call_does_not_end_with_tool_calls(name: str, stop_reason: str | int) -> None:
    format, text = ANSWERS[name]
    for length in range(len(text) + 1):
        reason, calls = ended(format, text[:length], "stop", stop_reason)
        assert len(calls) <= 1
        if reason == "tool_calls":
            assert isinstance(json.loads(calls[0][1]), dict)
        else:
            assert reason == "stop"
    assert ended(format, text, "stop", stop_reason)[0] == ended(format, text, "stop", None)[0] == "tool_calls"
    assert ended(format, text, "length", None)[0] == "length"
