"""APIs of servers that are measured: request bodies, and the model that a server has."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.bench.serving.datasets import SampleRequest, TokenizerLoader, as_text
from penstock.bench.serving.http import ConnectionLost, HttpClient, MalformedResponse, fetch
from penstock.errors import ConfigError, PenstockError

_Body = Callable[[SampleRequest], dict[str, Any]]


def _completion(request: SampleRequest) -> dict[str, Any]:
    return {"prompt": request.prompt, "max_tokens": request.output_len}


def _chat(request: SampleRequest) -> dict[str, Any]:
    message = {"role": "user", "content": request.prompt}
    return {"messages": [message], "max_completion_tokens": request.output_len}


@dataclass(frozen=True)
class Backend:
    """An API. endpoint: its usual path. body: of a request. takes_token_ids: whether prompts may be token ids."""

    endpoint: str
    body: _Body
    takes_token_ids: bool


_COMPLETIONS = Backend("/v1/completions", _completion, takes_token_ids=True)
BACKENDS = {
    "openai": _COMPLETIONS,
    "openai-chat": Backend("/v1/chat/completions", _chat, takes_token_ids=False),
    # Another name, as `vllm bench serve` has it.
    "vllm": _COMPLETIONS,
}


def backend_named(name: str) -> Backend:
    """Raises ConfigError for an unknown name."""
    if name not in BACKENDS:
        raise ConfigError(f"--backend {name} is not valid. Allowed: {', '.join(BACKENDS)}.")
    return BACKENDS[name]


class ServerUnreachable(PenstockError, RuntimeError):
    """The server does not answer, or not as a server of this API does."""


class RequestBodies:
    """Bodies of a benchmark's requests, as JSON bytes.

    model: name in the requests. extra: fields that override the others, such as sampling parameters.
    load_tokenizer: called only if token ids must become text.
    """

    def __init__(
        self, backend: Backend, model: str, extra: Mapping[str, Any], load_tokenizer: TokenizerLoader, seed: int
    ) -> None:
        self._backend = backend
        self._common = {"model": model, "stream": True, "temperature": 0.0}
        self._extra = extra
        self._load_tokenizer = load_tokenizer
        self._rng = random.Random(seed)

    def make(self, request: SampleRequest) -> tuple[bytes, int | None]:
        """Return the body, and the tokens of the prompt, if they are known."""
        if not self._backend.takes_token_ids and not isinstance(request.prompt, str):
            request = as_text(request, self._load_tokenizer(), self._rng)
        body = {**self._common, **self._backend.body(request), **self._extra}
        if body["stream"]:
            body.setdefault("stream_options", {"include_usage": True})
        return msgspec.json.encode(body), request.prompt_len


@dataclass(frozen=True)
class ServedModel:
    """A model of a server. root: folder or hub id that it was loaded from, if the server says so, else its name."""

    id: str
    root: str


async def first_model(client: HttpClient) -> ServedModel:
    """Return the first model of /v1/models. Raises ServerUnreachable."""
    try:
        response = await fetch(client, "GET", "/v1/models")
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {response.body[:200].decode(errors='replace')}")
        model = msgspec.json.decode(response.body)["data"][0]
        return ServedModel(model["id"], model.get("root") or model["id"])
    except (OSError, ConnectionLost, MalformedResponse, ValueError, LookupError, TypeError) as error:
        raise ServerUnreachable(
            f"/v1/models gives no model ({error}). Check --base-url, and that the server is ready; or give --model."
        ) from error
