"""Writer of OpenAI's batch format."""

from __future__ import annotations

import time
from enum import Enum
from typing import Any
from uuid import uuid4

import msgspec

from penstock.engine.output.outputs import CompletionOutput, RequestOutput
from penstock.server.requests.logprobs import CompletionLogprobs, LogprobsFormat
from penstock.server.requests.samples import Usage
from penstock.text.detokenizer import SpecialTokens
from penstock.text.tokenizer import Tokenizer

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
    skips_special: whether the text is without special tokens.
    """

    custom_id: Any
    endpoint: Endpoint
    model: str
    num_logprobs: int | None = None
    skips_special: bool = True

    def lines(
        self, index: int, output: RequestOutput, *, request_hash: str | None, tokenizer: Tokenizer | None
    ) -> list[dict[str, Any]]:
        name = uuid4().hex
        if output.error is None and tokenizer is not None:
            status, body, error = 200, self._body(name, output, tokenizer), None
        else:
            was_refused = tokenizer is None
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

    def _body(self, name: str, output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
        is_chat = self.endpoint is Endpoint.CHAT
        choices = [self._choice(output, completion, tokenizer) for completion in output.outputs]
        usage = Usage()
        usage.note(0, output)
        # Answers are not parsed for reasoning.
        details = {"completion_tokens_details": {"reasoning_tokens": 0}} if is_chat else {}
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {**usage.data(), **details},
        }

    def _choice(self, output: RequestOutput, completion: CompletionOutput, tokenizer: Tokenizer) -> dict[str, Any]:
        is_chat = self.endpoint is Endpoint.CHAT
        message = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
        text = {"text": completion.text, "prompt_logprobs": None}
        return {
            "index": completion.index,
            **(message if is_chat else text),
            "logprobs": self._logprobs(output, completion, tokenizer),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _logprobs(
        self, output: RequestOutput, completion: CompletionOutput, tokenizer: Tokenizer
    ) -> dict[str, Any] | None:
        """Log-probabilities as the server writes them."""
        if completion.logprobs is None:
            return None
        form = LogprobsFormat(tokenizer, self.num_logprobs or 0, names_ids=False)
        if self.endpoint is Endpoint.CHAT:
            return form.chat(completion.token_ids, completion.logprobs)
        special = SpecialTokens(are_shown=not self.skips_special, are_spaced=True)
        detokenizer = tokenizer.start_detokenizer(output.prompt_token_ids, special)
        return CompletionLogprobs(form, detokenizer).part(completion.token_ids, completion.logprobs)
