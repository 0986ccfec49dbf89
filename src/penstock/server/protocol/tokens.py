"""Requests with tokens in place of texts, and requests about requests, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from penstock.server.protocol.base import RequestModel, StreamOptions, TokenIds, field_error
from penstock.server.protocol.chat import ChatCompletionRequest, Messages
from penstock.server.protocol.other_fields import OtherField

_OTHERS: dict[str, OtherField] = {
    "features": OtherField((), "models here read and write text"),
    "token_offsets": OtherField(None, "it changes no answer"),
    "assistant_tokens_mask": OtherField(None, "it changes no answer"),
}


class GenerateRequest(RequestModel):
    """Request of `/inference/v1/generate`: token ids in, token ids out.

    request_id: name of the request at the engine. sampling_params: fields of `SamplingParams`; without max_tokens, as
    many as fit. kv_transfer_params: as in `SamplingFields`.
    """

    other_fields: ClassVar[Mapping[str, OtherField]] = _OTHERS

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class BatchChatRequest(ChatCompletionRequest):
    """Request of `/v1/chat/completions/batch`: conversations with the same fields, each of which gets a choice."""

    messages: Annotated[list[Messages], Field(min_length=1, fail_fast=True)]  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check_batch(self) -> BatchChatRequest:
        if self.stream:
            raise field_error(
                "stream", "stream=true is not available. Allowed: false: all conversations are one answer."
            )
        if self.n not in (None, 1):
            raise field_error("n", f"n={self.n} is not available. Allowed: 1: each conversation has one choice.")
        return self

    @property
    def chats(self) -> list[ChatCompletionRequest]:
        """A chat request per conversation."""
        return [ChatCompletionRequest.model_construct(**{**self.__dict__, "messages": one}) for one in self.messages]


class AbortRequest(RequestModel):
    """Request of `/abort_requests`. request_ids: names of requests at the engine, which are the ids of responses."""

    request_ids: Annotated[list[str], Field(fail_fast=True)]
