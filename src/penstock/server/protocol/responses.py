"""Responses, for the OpenAPI document. They are sent as dictionaries, without validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """An error. param: name of the request's field. code: name of the error for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


_DESCRIPTIONS = {
    400: "The request is not valid.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    408: "The request's timeout passed before anything was sent, or the request took too long to arrive.",
    409: "The engine's state does not allow it.",
    413: "The body is too large.",
    424: "The model does not have the task, or failed.",
    429: "Too many requests wait; Retry-After has the seconds to wait.",
    500: "The server or the request's generation failed.",
    503: "The engine does not serve.",
    507: "There is not enough memory, or space on a disk.",
}


def errors(*statuses: int, model: Any = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """Error responses of a route. model: their shape."""
    return {status: {"model": model, "description": _DESCRIPTIONS[status]} for status in statuses}


def form_of_file(fields: Mapping[str, Mapping[str, Any]], *required: str) -> dict[str, Any]:
    """Description of a form with a file, for OpenAPI. fields: schemas of the others. required: their names."""
    properties = {"file": {"type": "string", "format": "binary"}, **fields}
    schema = {"type": "object", "properties": properties, "required": ["file", *required]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class ChatUsageBody(UsageBody):
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobsBody(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class EncodedStates(BaseModel):
    """Hidden states in base64: little-endian, row-major numbers of this shape. dtype: such as "bfloat16"."""

    dtype: str
    shape: list[int]
    data: str


# Of one layer: a list of numbers for the last token, a list of such for all; with hidden_states_layers, by layer.
States: TypeAlias = list[float] | list[list[float]] | EncodedStates
HiddenStatesBody: TypeAlias = States | dict[str, States]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    hidden_states: HiddenStatesBody | None = None
    schema_errors: list[str] | None = None
    weight_version: int | None = None


class CompletionResponse(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    kv_transfer_params: dict[str, Any] | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobsBody(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionBody(BaseModel):
    name: str
    arguments: str


class ToolCallBody(BaseModel):
    id: str
    type: str
    function: FunctionBody


class AnswerMessage(BaseModel):
    role: str
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobsBody | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    hidden_states: HiddenStatesBody | None = None
    schema_errors: list[str] | None = None
    weight_version: int | None = None


class ChatCompletionResponse(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsageBody
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    tasks: list[str]
    modalities: list[str]


class ModelList(BaseModel):
    object: str
    data: list[ModelCard]


class Version(BaseModel):
    version: str


class PrefixCacheReset(BaseModel):
    reset: bool


class IsSleeping(BaseModel):
    is_sleeping: bool


class IsPaused(BaseModel):
    is_paused: bool


class PauseStatus(BaseModel):
    status: Literal["paused", "resumed"]


class ProfileStarted(BaseModel):
    started: bool


class ProfileStopped(BaseModel):
    """paths: traces, on the server's machine."""

    paths: list[str]


class TokenCount(BaseModel):
    input_tokens: int


class MessagesErrorBody(BaseModel):
    type: str
    message: str


class MessagesErrorResponse(BaseModel):
    """An error of the messages API."""

    type: str
    error: MessagesErrorBody


class OllamaErrorResponse(BaseModel):
    """An error of Ollama's API."""

    error: str


class TeiErrorResponse(BaseModel):
    """An error of TEI's API."""

    error: str
    error_type: str


class TeiRank(BaseModel):
    """Place of a text, as TEI's `/rerank` has it."""

    index: int
    score: float
    text: str | None = None


_GENERATION_ERRORS = errors(400, 401, 404, 408, 413, 429, 500, 503)
_EVENT = {
    "description": "An event of the stream. data: a chunk as JSON, or [DONE] at the end. event: error, with an error.",
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_STREAM = {"text/event-stream": {"schema": _EVENT}}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": _STREAM}}
STREAMED_TOKENS: dict[int | str, dict[str, Any]] = {**STREAMED, **_GENERATION_ERRORS}
COMPLETION_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": CompletionResponse, "content": _STREAM},
    **_GENERATION_ERRORS,
}
RESPONSES_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The response.", "content": _STREAM},
    **_GENERATION_ERRORS,
}
CHAT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": ChatCompletionResponse, "content": _STREAM},
    **_GENERATION_ERRORS,
}
MESSAGES_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The message.", "content": _STREAM},
    **errors(400, 401, 404, 408, 413, 429, 500, 503, model=MessagesErrorResponse),
}
OLLAMA_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its lines.", "content": {"application/x-ndjson": {"schema": {}}}},
    **errors(400, 401, 404, 408, 413, 429, 500, 503, model=OllamaErrorResponse),
}
COUNT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": TokenCount},
    **errors(400, 401, 404, 408, 413, 500, model=MessagesErrorResponse),
}
