"""Requests of a soak test: what is asked, and which ends of it are the client's own doing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.bench.serving.http import WholeResponse
from penstock.bench.serving.outcome import Outcome, Status

_TEXTS = ("To be, or not to be", "What is 47 + 38?", "Reverse this list: apple, river, stone", "ROMEO:", "Who are you?")
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "is_new": {"type": "boolean"}},
    "required": ["colour", "is_new"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class SoakRequest:
    """One request. body: JSON, or text that is none.

    leave_after: chunks after which the client disconnects. leave_after_s: seconds after which it does. statuses: that
    it may end with, beside 429. may_time_out: whether the stream may end with an error, by its own deadline. check:
    returns what is wrong with a complete answer, if there is a way to tell.
    """

    path: str
    body: dict[str, Any] | str
    leave_after: int | None = None
    leave_after_s: float | None = None
    statuses: tuple[int, ...] = (200,)
    may_time_out: bool = False
    check: Callable[[Outcome], str | None] | None = None

    def fault(self, outcome: Outcome) -> str | None:
        """Return what the server did wrong; None if all went well, or the client caused the end itself."""
        if outcome.status is Status.DISCONNECTED or outcome.status is Status.REJECTED:
            return None
        if outcome.status is Status.COMPLETED:
            if 200 not in self.statuses:
                return "was answered, and should have been refused"
            return None if self.check is None else self.check(outcome)
        if outcome.http_status != 200 and outcome.http_status in self.statuses:
            return None
        if self.may_time_out and outcome.cause == "error in the stream":
            return None
        return f"{outcome.cause}: {outcome.error}"


Maker = Callable[[random.Random, str], SoakRequest]


def completion(rng: random.Random, model: str) -> SoakRequest:
    stream = rng.random() < 0.5
    prompt: Any = (
        rng.choice(_TEXTS) if rng.random() < 0.5 else [rng.randrange(10, 200) for _ in range(rng.randint(4, 200))]
    )
    body = {"model": model, "prompt": prompt, "stream": stream, **_sampling(rng)}
    return SoakRequest("/v1/completions", body)


def chat(rng: random.Random, model: str) -> SoakRequest:
    return SoakRequest("/v1/chat/completions", {**_chat_body(rng, model), "stream": rng.random() < 0.5})


def json_schema(rng: random.Random, model: str) -> SoakRequest:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True}}
    body = {
        **_chat_body(rng, model),
        "max_completion_tokens": 200,
        "response_format": form,
        "stream": rng.random() < 0.5,
    }
    return SoakRequest("/v1/chat/completions", body, check=_check_json)


def logprobs(rng: random.Random, model: str) -> SoakRequest:
    body = {"model": model, "prompt": rng.choice(_TEXTS), "logprobs": rng.randint(0, 5), "stream": rng.random() < 0.5}
    return SoakRequest("/v1/completions", {**body, **_sampling(rng)})


def several_answers(rng: random.Random, model: str) -> SoakRequest:
    body = {"model": model, "prompt": rng.choice(_TEXTS), "n": 3, "stream": rng.random() < 0.5}
    return SoakRequest("/v1/completions", {**body, **_sampling(rng), "temperature": 0.9})


def disconnect_in_a_stream(rng: random.Random, model: str) -> SoakRequest:
    body = {**_chat_body(rng, model), "max_completion_tokens": 200, "ignore_eos": True, "stream": True}
    return SoakRequest("/v1/chat/completions", body, leave_after=rng.randint(1, 30))


def disconnect_while_waiting(rng: random.Random, model: str) -> SoakRequest:
    body = {"model": model, "prompt": rng.choice(_TEXTS), "max_tokens": 400, "ignore_eos": True}
    return SoakRequest("/v1/completions", body, leave_after_s=rng.uniform(0.0, 0.3))


def deadline(rng: random.Random, model: str) -> SoakRequest:
    body = {"model": model, "prompt": rng.choice(_TEXTS), "max_tokens": 400, "ignore_eos": True}
    body |= {"timeout": rng.uniform(0.001, 0.3), "stream": rng.random() < 0.5}
    return SoakRequest("/v1/completions", body, statuses=(200, 408, 504), may_time_out=True)


def bad_request(rng: random.Random, model: str) -> SoakRequest:
    body = {"model": model, "prompt": rng.choice(_TEXTS), "max_tokens": 8}
    bad: list[tuple[str, dict[str, Any] | str, int]] = [
        ("/v1/completions", "{not JSON", 400),
        ("/v1/completions", {**body, "temperature": -1}, 400),
        ("/v1/completions", {**body, "max_tokens": -5}, 400),
        ("/v1/completions", {**body, "prompt": {"a": 1}}, 400),
        ("/v1/completions", {**body, "prompt": [7] * 100_000}, 400),
        ("/v1/completions", {**body, "model": "no such model"}, 404),
        ("/v1/chat/completions", {"model": model}, 400),
        ("/v1/chat/completions", {"model": model, "messages": []}, 400),
        ("/v1/chat/completions", {**_chat_body(rng, model), "response_format": {"type": "json_schema"}}, 400),
        ("/v1/nothing", body, 404),
    ]
    path, body_or_text, status = rng.choice(bad)
    # Bodies that do not fit the API's schema are 422 for some servers.
    return SoakRequest(path, body_or_text, statuses=(status, 422) if status == 400 else (status,))


# Kinds of requests, and how often each is drawn.
KINDS: dict[Maker, int] = {
    completion: 6,
    chat: 6,
    json_schema: 3,
    logprobs: 2,
    several_answers: 1,
    disconnect_in_a_stream: 2,
    disconnect_while_waiting: 1,
    deadline: 2,
    bad_request: 2,
}


def name_of(kind: Maker) -> str:
    return kind.__name__.replace("_", " ")


def _chat_body(rng: random.Random, model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": rng.choice(_TEXTS)}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "Answer briefly."})
    sampling = _sampling(rng)
    sampling["max_completion_tokens"] = sampling.pop("max_tokens")
    return {"model": model, "messages": messages, **sampling}


def _sampling(rng: random.Random) -> dict[str, Any]:
    return {
        "max_tokens": rng.randint(1, 120),
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "top_p": rng.choice((0.9, 1.0)),
    }


def _check_json(outcome: Outcome) -> str | None:
    """A complete answer is JSON of the schema."""
    if outcome.finish_reason != "stop":
        return None
    try:
        answer = json.loads(outcome.text)
    except ValueError:
        return f"the answer is not JSON: {outcome.text!r}"
    is_valid = isinstance(answer, dict) and set(answer) == set(_SCHEMA["properties"]) and type(answer["is_new"]) is bool
    return None if is_valid else f"the answer is not of the schema: {outcome.text!r}"


def metric(response: WholeResponse, name: str) -> float | None:
    """Sum of a metric's samples in the text of /metrics, whatever its prefix; None if there is none."""
    values = []
    for line in response.body.decode().splitlines():
        full_name = line.partition("{")[0].partition(" ")[0]
        if not line.startswith("#") and full_name.rpartition(":")[2] == name:
            values.append(float(line.rpartition(" ")[2]))
    return sum(values) if values else None
