"""Writer of OpenAI's batch format."""

from __future__ import annotations

import time
from enum import Enum
from typing import Any
from uuid import uuid4

import msgspec

from penstock.engine.output.outputs import CompletionOutput, Logprob, RequestOutput

# Log-probability of an impossible token, since JSON has no infinity.
_LOWEST_LOGPROB = -9999.0
_BAD_REQUEST = 400
_SERVER_ERROR = 500
# Prefix of an answer's id, before the hash of its request.
ID_PREFIX = "batch_req_"


class Endpoint(Enum):
    """Endpoint of a request, by its url."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


class BatchFormat(msgspec.Struct, frozen=True):
    """One line per request, with all its outputs as choices.

    custom_id: name of the request. model: that answered. num_logprobs: top log-probabilities per token.
    """

    custom_id: Any
    endpoint: Endpoint
    model: str
    num_logprobs: int | None = None

    def lines(
        self, index: int, output: RequestOutput, *, request_hash: str | None, was_refused: bool
    ) -> list[dict[str, Any]]:
        name = uuid4().hex
        if output.error is None:
            status, body, error = 200, self._body(name, output), None
        else:
            status = _BAD_REQUEST if was_refused else _SERVER_ERROR
            kind = "invalid_request_error" if was_refused else "server_error"
            body = {"error": {"message": output.error, "type": kind, "param": None, "code": status}}
            error = {"code": kind, "message": output.error}
        response = {"status_code": status, "request_id": f"req_{name}", "body": body}
        id = f"{ID_PREFIX}{request_hash or name}"
        return [{"id": id, "custom_id": self.custom_id, "response": response, "error": error}]

    def num_lines(self, num_outputs: int) -> int:
        return 1

    def identity(self, index: int) -> Any:
        return [self.custom_id, self.endpoint.value]

    def _body(self, name: str, output: RequestOutput) -> dict[str, Any]:
        is_chat = self.endpoint is Endpoint.CHAT
        num_prompt_tokens = len(output.prompt_token_ids)
        num_output_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [self._chat_choice(one) if is_chat else self._text_choice(one) for one in output.outputs],
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_output_tokens,
                "total_tokens": num_prompt_tokens + num_output_tokens,
                "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
            },
        }

    def _chat_choice(self, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": None if completion.logprobs is None else {"content": self._chat_logprobs(completion)},
            "finish_reason": completion.finish_reason,
        }

    def _text_choice(self, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": completion.index,
            "text": completion.text,
            "logprobs": None if completion.logprobs is None else self._text_logprobs(completion),
            "finish_reason": completion.finish_reason,
        }

    def _chat_logprobs(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        return [
            {**_token(sampled), "top_logprobs": [_token(other) for other in self._likeliest(row)]}
            for sampled, row in _sampled(completion)
        ]

    def _text_logprobs(self, completion: CompletionOutput) -> dict[str, Any]:
        rows = _sampled(completion)
        offsets, length = [], 0
        for sampled, _ in rows:
            offsets.append(length)
            length += len(sampled.decoded_token)
        return {
            "text_offset": offsets,
            "tokens": [sampled.decoded_token for sampled, _ in rows],
            "token_logprobs": [_finite(sampled) for sampled, _ in rows],
            "top_logprobs": [
                {other.decoded_token: _finite(other) for other in (*self._likeliest(row), sampled)}
                for sampled, row in rows
            ],
        }

    def _likeliest(self, row: dict[int, Logprob]) -> list[Logprob]:
        """Top log-probabilities of a row, as many as requested; a row has the sampled token too."""
        ranked = sorted(row.values(), key=lambda entry: entry.rank)
        most = self.num_logprobs or 0
        return ranked if most < 0 else [entry for entry in ranked if entry.rank <= most]


def _sampled(completion: CompletionOutput) -> list[tuple[Logprob, dict[int, Logprob]]]:
    """Yield the sampled token's entry of each row, and the row."""
    rows = completion.logprobs or []
    return [(row[token_id], row) for token_id, row in zip(completion.token_ids, rows, strict=True)]


def _token(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token
    return {"token": text, "logprob": _finite(entry), "bytes": list(text.encode("utf-8", errors="replace"))}


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST_LOGPROB)
