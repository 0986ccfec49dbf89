"""Writer of OpenAI's batch format: answers as the server writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from penstock.contract import SamplingParams
from penstock.engine.output.outputs import RequestOutput
from penstock.server.batches.lines import answer_line
from penstock.server.http.errors import ApiError
from penstock.server.options import ServerOptions
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.completion import CompletionRequest
from penstock.server.requests.answer import PlainAnswer
from penstock.server.routes.chat import ChatChoices
from penstock.server.routes.completions import CompletionChoices
from penstock.text.tokenizer import Tokenizer


@dataclass
class _Model:
    """The model of an answer, served with default options."""

    name: str
    tokenizer: Tokenizer
    options: ServerOptions


@dataclass(frozen=True)
class BatchFormat:
    """Format of batch results: a line per request, with all its outputs as choices.

    custom_id: name of the request. url: of its endpoint. model: that answered. request, params: None for one that is
    refused.
    """

    custom_id: Any
    url: str
    model: str
    request: ChatCompletionRequest | CompletionRequest | None = None
    params: SamplingParams | None = None

    def lines(
        self, index: int, output: RequestOutput, *, request_hash: str | None, tokenizer: Tokenizer | None
    ) -> list[dict[str, Any]]:
        name = uuid4().hex
        if output.error is None and tokenizer is not None:
            status, body = 200, self._body(name, output, tokenizer)
        else:
            failure = ApiError(400 if tokenizer is None else 500, output.error or "")
            status, body = failure.status_code, failure.body
        return [answer_line(request_hash or name, self.custom_id, status, f"req_{name}", body)]

    def num_lines(self, num_outputs: int) -> int:
        return 1

    def identity(self, index: int) -> Any:
        return [self.custom_id, self.url]

    def _body(self, name: str, output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
        model = _Model(self.model, tokenizer, ServerOptions(served_model_name=(self.model,)))
        assert self.params is not None, "a request that is answered was read"
        if isinstance(self.request, ChatCompletionRequest):
            # Answers are not parsed for tool calls and reasoning.
            return ChatChoices(model, self.request, PlainAnswer(), self.params, f"chatcmpl-{name}").body(output)
        assert self.request is not None, "a request that is answered was read"
        return CompletionChoices(model, self.request, self.params, f"cmpl-{name}").body([output])
