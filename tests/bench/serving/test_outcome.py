"""Outcomes of responses whose bytes arrive at scripted times."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.serving.outcome import AnswerReader, ClientLeaves, Outcome, RequestFailed, Status

STREAM = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}


def event(content: Any) -> bytes:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


def token(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": finish_reason}]})


def chat(finish_reason: str | None = None, **delta: Any) -> bytes:
    return event({"choices": [{"delta": delta, "finish_reason": finish_reason}]})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = event("[DONE]")


def read(
    *arrivals: tuple[float, bytes], headers: dict[str, str] = STREAM, status: int = 200, **options: Any
) -> Outcome:
    """Outcome of a request at 10 s, whose bytes arrive at these times."""
    outcome = Outcome(start=10.0, prompt_len=4)
    reader = AnswerReader(outcome, **options)
    reader.begin(status, headers, arrivals[0][0])
    for now, data in arrivals:
        reader.feed(data, now)
    reader.end(arrivals[-1][0])
    return outcome


def test_latencies_are_those_of_the_arrivals() -> None:
    outcome = read((10.5, token("a")), (10.7, token("b")), (11.0, token("c") + usage(6, 3)), (11.1, DONE))
    assert outcome.status is Status.COMPLETED
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.itl_s == pytest.approx([0.2, 0.3])
    assert outcome.latency_s == pytest.approx(1.1)
    assert outcome.tpot_s == pytest.approx(0.6 / 2)
    assert (outcome.prompt_len, outcome.output_len, outcome.text) == (6, 3, "abc")


def test_tokens_of_chunks_that_have_several_are_those_of_the_usage() -> None:
    outcome = read((11.0, token("ab")), (12.0, token("cd", "length") + usage(4, 5) + DONE))
    assert outcome.tpot_s == pytest.approx(1.0 / 4)
    assert outcome.itl_s == pytest.approx([1.0])


def test_without_usage_chunks_are_counted() -> None:
    outcome = read((11.0, token("a") + token("b") + token("", "stop") + DONE))
    assert (outcome.prompt_len, outcome.output_len, outcome.is_counted) == (4, 2, False)


def test_the_first_token_of_a_chat_is_not_its_role() -> None:
    role, end = chat(role="assistant", content=""), chat("stop")
    outcome = read((10.1, role), (10.4, chat(content="a")), (10.5, chat(content="b") + end + DONE))
    assert outcome.ttft_s == pytest.approx(0.4)
    assert outcome.output_len == 2


@pytest.mark.parametrize("delta", [{"reasoning": "a"}, {"reasoning_content": "a"}, {"tool_calls": [{"index": 0}]}])
def test_reasoning_and_tool_calls_are_tokens(delta: dict[str, Any]) -> None:
    assert read((10.4, chat(**delta)), (10.5, chat("stop") + DONE)).ttft_s == pytest.approx(0.4)


def test_a_token_without_text_counts_for_a_completion() -> None:
    assert read((10.4, token("")), (10.5, token("é", "stop") + DONE)).ttft_s == pytest.approx(0.4)


@given(st.lists(st.integers(0, 600), max_size=12), st.booleans())
def test_a_stream_is_the_same_however_it_arrives(places: list[int], with_carriage_returns: bool) -> None:
    data = b": comment\n\nevent: x\n" + token("a") + token("é") + usage(3, 2) + DONE
    data = data.replace(b"\n", b"\r\n") if with_carriage_returns else data
    cuts = sorted({place % len(data) for place in places})
    parts = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    outcome = read(*((11.0, part) for part in parts))
    assert (outcome.text, outcome.prompt_len, outcome.output_len) == ("aé", 3, 2)
    assert outcome.chunk_times == [11.0, 11.0]


def test_a_whole_response_has_no_first_token() -> None:
    body = {
        "choices": [{"text": "ab", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }
    outcome = read((12.0, json.dumps(body).encode()), headers=JSON)
    assert outcome.status is Status.COMPLETED
    assert (outcome.ttft_s, outcome.tpot_s, outcome.itl_s) == (None, None, [])
    assert (outcome.latency_s, outcome.prompt_len, outcome.output_len, outcome.text) == (2.0, 5, 2, "ab")
    assert outcome.finish_reason == "length"


@pytest.mark.parametrize(
    ("data", "cause", "message"),
    [
        (token("a") + event("{not JSON"), "malformed chunk", "{not JSON"),
        (token("a") + event({"choices": 3}), "malformed chunk", "choices"),
        (token("a") + event({"error": {"message": "engine died", "code": 500}}), "error in the stream", "engine died"),
        (token("a"), "stream ended early", "without a finish_reason"),
    ],
)
def test_streams_that_fail_name_their_cause(data: bytes, cause: str, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as raised:
        read((11.0, data))
    assert raised.value.cause == cause


@pytest.mark.parametrize(
    ("status", "body", "cause", "message"),
    [
        (400, b'{"error": {"message": "too long", "type": "invalid_request_error"}}', "HTTP 400", "too long"),
        (500, b"Internal Server Error", "HTTP 500", "Internal Server Error"),
        (422, b'{"detail": "wrong"}', "HTTP 422", "detail"),
        (200, b"hello", "malformed response", "hello"),
        (200, b'{"object": "list"}', "malformed response", "no finish_reason"),
    ],
)
def test_responses_that_fail_name_their_cause(status: int, body: bytes, cause: str, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as raised:
        read((11.0, body), headers=JSON, status=status)
    assert raised.value.cause == cause


@pytest.mark.parametrize(
    ("given_value", "seconds"), [("7", 7.0), ("1.5", 1.5), ("Wed, 21 Oct 2026 07:28:00 GMT", None)]
)
def test_a_rejection_says_when_to_try_again(given_value: str, seconds: float | None) -> None:
    outcome = Outcome(start=0.0)
    AnswerReader(outcome).begin(429, {"retry-after": given_value}, 1.0)
    assert outcome.retry_after_s == seconds


def test_a_client_leaves_after_its_number_of_chunks() -> None:
    with pytest.raises(ClientLeaves):
        read((11.0, token("a") + token("b")), leave_after=2)
    assert read((11.0, token("a") + DONE), leave_after=2).status is Status.COMPLETED
