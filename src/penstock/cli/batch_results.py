"""Requests of OpenAI's batch format and their answers, as the server makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from penstock.contract import SamplingParams
from penstock.engine.output.outputs import RequestOutput
from penstock.errors import InvalidParameter
from penstock.server.batches.lines import answer_line
from penstock.server.chat_model import ChatModel
from penstock.server.http.errors import ApiError
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.completion import CompletionRequest
from penstock.server.requests.answer import AnswerFormat, PlainAnswer
from penstock.server.requests.chat_task import chat_task
from penstock.server.routes.chat import ChatChoices
from penstock.server.routes.completions import CompletionChoices
from penstock.text.tokenizer import Tokenizer


@dataclass(slots=True)
class BatchFormat:
    """Format of batch results: a line per request, with all its outputs as choices.

    custom_id: name of the request. url: of its endpoint. model: that answers, by its tokenizer. request, params: None
    for one that is refused. form: of a chat's answers, known with the tokenizer.
    """

    custom_id: Any
    url: str
    model: Callable[[Tokenizer], ChatModel]
    request: ChatCompletionRequest | CompletionRequest | None = None
    params: SamplingParams | None = None
    form: AnswerFormat = field(default_factory=PlainAnswer)

    def task(self, prompt: Any, params: SamplingParams, tokenizer: Tokenizer) -> tuple[Any, SamplingParams]:
        if not isinstance(self.request, ChatCompletionRequest):
            return prompt, params
        try:
            task = chat_task(self.model(tokenizer), self.request, "")
        except ApiError as error:
            raise InvalidParameter(error.message) from error
        self.form, self.params = task.form, task.submission.params
        return task.submission.prompt, task.submission.params

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
        model = self.model(tokenizer)
        assert self.params is not None, "a request that is answered was read"
        if isinstance(self.request, ChatCompletionRequest):
            return ChatChoices(model, self.request, self.form, self.params, f"chatcmpl-{name}").body(output)
        assert self.request is not None, "a request that is answered was read"
        return CompletionChoices(model, self.request, self.params, f"cmpl-{name}").body([output])
