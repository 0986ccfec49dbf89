"""Reader of OpenAI's batch format: bodies as the server reads them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from penstock.cli.batch_results import BatchFormat
from penstock.cli.work import Work
from penstock.config import vllm
from penstock.contract import SamplingParams
from penstock.engine.inputs.input_processor import located
from penstock.errors import InvalidParameter, InvalidRequest
from penstock.server.batches.lines import BATCH_FIELDS, LineChecks
from penstock.server.chat_model import ChatModel
from penstock.server.http.errors import ApiError
from penstock.server.http.unknown_fields import UnknownFields
from penstock.server.http.validation import validation_error
from penstock.server.options import ServerOptions
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.completion import CompletionRequest
from penstock.server.requests.answer import PlainAnswer
from penstock.server.requests.chat_task import chat_params
from penstock.server.requests.sampling import structured_outputs
from penstock.server.routes.completions import completion_params, prompt_of

logger = logging.getLogger(__name__)

# A request in Penstock's own format has one of these.
_OWN_FIELDS = ("prompt", "prompt_token_ids", "messages")
_CHAT = "/v1/chat/completions"
_REQUESTS: dict[str, type[ChatCompletionRequest | CompletionRequest]] = {
    _CHAT: ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}
# Fields of which a server can do more, and the values that a file may have.
_ONLY: dict[str, tuple[Any, ...]] = {"stream": (False,), "timeout": ()}
_ONLY_OF_CHATS: dict[str, tuple[Any, ...]] = {"add_special_tokens": (False,)}


def read_batch_lines(
    lines: Sequence[tuple[str, dict[str, Any] | InvalidRequest]],
    names: Mapping[str, str],
    defaults: SamplingParams,
    chat_defaults: SamplingParams,
    options: ServerOptions,
) -> dict[str, Work]:
    """Read the requests of lines in this format, and of broken lines beside them.

    lines: place of each line, for errors, and its fields, or why it has none. names: custom_id of lines without fields,
    if it could be read. defaults, chat_defaults: of parameters that a body does not have. options: of the server that
    would answer, which is named as the running model. A file for one other model is answered by it, with a warning;
    among several names only its own is accepted.

    Returns the requests by place; errors are in their `Work.error`.
    """
    reader = _Reader(defaults, chat_defaults, names, options, {_model_of(fields) for _, fields in lines} - {None})
    return {where: reader.read(where, fields) for where, fields in lines if _is_ours(fields)}


class _Reader:
    """Reader of the lines of a file. named: models of its requests."""

    def __init__(
        self,
        defaults: SamplingParams,
        chat_defaults: SamplingParams,
        names: Mapping[str, str],
        options: ServerOptions,
        named: set[Any],
    ) -> None:
        self._defaults = defaults
        self._chat_defaults = chat_defaults
        self._names = names
        self._model = model = options.served_model_name[0]
        self._options = options
        self._chat_model = functools.cache(lambda tokenizer: ChatModel(tokenizer, options, chat_defaults))
        self._answers_any = len(named) <= 1
        self._unknown = UnknownFields("refuse")
        self._checks = LineChecks(_REQUESTS)
        if self._answers_any and named - {model}:
            logger.warning("The requests are for the model %r; %r answers them.", *named, model)

    def read(self, where: str, fields: dict[str, Any] | InvalidRequest) -> Work:
        given = {} if isinstance(fields, InvalidRequest) else fields
        name, url = given.get("custom_id", self._names.get(where)), _text(given.get("url"))
        try:
            with located(where):
                if isinstance(fields, InvalidRequest):
                    raise fields
                self._checks.check(where, fields)
                request, prompt, params = self._read_body(_REQUESTS[url], fields["body"])
        except InvalidRequest as error:
            return Work(None, self._defaults, where, BatchFormat(name, url, self._chat_model), error)
        form = BatchFormat(name, url, self._chat_model, request, params)
        return Work(prompt, params, where, form, priority=request.priority)

    def _read_body(
        self, kind: type[ChatCompletionRequest | CompletionRequest], given: dict[str, Any]
    ) -> tuple[ChatCompletionRequest | CompletionRequest, Any, SamplingParams]:
        body = self._unknown.without(_whole_body(given), kind)
        body = vllm.parameters_as_ours(body, kind.model_fields)
        only = _ONLY | _ONLY_OF_CHATS if kind is ChatCompletionRequest else _ONLY
        for key in only.keys() & body.keys():
            if body[key] is not None and body[key] not in only[key]:
                allowed = " or ".join(map(repr, only[key])) or "none"
                raise InvalidParameter(f"{key}={body[key]!r} is not available. Allowed: {allowed}.")
        try:
            request = kind.model_validate(body)
            self._check_model(request.model)
            if isinstance(request, ChatCompletionRequest):
                return self._chat(request)
            if len(request.prompt) > 1:
                raise InvalidRequest(
                    f"prompt has {len(request.prompt)} prompts. Allowed: one prompt per line, text or token ids."
                )
            return request, prompt_of(request.prompt[0], request), completion_params(request, self._defaults)
        except ValidationError as error:
            errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise InvalidParameter(validation_error(errors, body, kind.model_fields).message) from error
        except ApiError as error:
            raise InvalidParameter(error.message) from error

    def _chat(self, request: ChatCompletionRequest) -> tuple[ChatCompletionRequest, Any, SamplingParams]:
        """A chat, what tells its prompt from others, and its parameters, but for what tools and reasoning change."""
        if request.max_tokens is None and request.max_completion_tokens is None:
            request = request.model_copy(update={"max_tokens": self._chat_defaults.max_tokens})
        identity = [request.model_dump(exclude_none=True), self._options.tool_call_parser]
        content = structured_outputs(request, self._chat_defaults.structured_outputs)
        return request, identity, chat_params(request, self._chat_defaults, PlainAnswer(content))

    def _check_model(self, named: str | None) -> None:
        if named is not None and named != self._model and not self._answers_any:
            raise InvalidRequest(
                f"model={named!r} is not the one that runs. Allowed: {self._model!r}, none, or the same in all "
                "requests."
            )


def _is_ours(fields: dict[str, Any] | InvalidRequest) -> bool:
    """Whether a line is answered in the batch format: all but requests in Penstock's own format."""
    return (
        isinstance(fields, InvalidRequest)
        or not fields.keys().isdisjoint(BATCH_FIELDS)
        or fields.keys().isdisjoint(_OWN_FIELDS)
    )


def _model_of(fields: dict[str, Any] | InvalidRequest) -> str | None:
    body = None if isinstance(fields, InvalidRequest) else fields.get("body")
    return (_text(body.get("model")) or None) if isinstance(body, dict) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole_body(body: dict[str, Any]) -> dict[str, Any]:
    """Merge the fields of `extra_body` into a body, as clients do."""
    extra = body.get("extra_body")
    if extra is None:
        return body
    if not isinstance(extra, dict):
        raise InvalidParameter(f"extra_body={extra!r} is not valid. Allowed: an object with fields of the body.")
    return {**{key: value for key, value in body.items() if key != "extra_body"}, **extra}
