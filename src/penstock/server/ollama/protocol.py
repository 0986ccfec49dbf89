"""Requests of Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from penstock.server.protocol.base import Objects, RequestModel, StrictModel, Texts, field_error
from penstock.server.protocol.other_fields import OtherField

_OTHERS: dict[str, OtherField] = {
    "suffix": OtherField(("",), "models here continue a text, and fill no gap in one"),
    "template": OtherField(("",), "the model's own chat template, or raw=true, is used"),
    "context": OtherField(([],), "conversations are not kept between requests; use /api/chat with all messages"),
    "truncate": OtherField((True, False), "it is true or false"),
    "shift": OtherField((False,), "an answer that reaches the end of the context ends"),
}


class OllamaFields(RequestModel):
    """Fields of all requests. model: a served name, with or without ":latest"."""

    model: str | None = None
    options: dict[str, Any] | None = None


class OllamaGeneration(OllamaFields):
    """Fields of generating requests.

    format: "json", or a JSON schema. think: whether the model reasons, or how much ("low", "medium", "high").
    """

    other_fields: ClassVar[Mapping[str, OtherField]] = _OTHERS

    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _check_generation(self) -> OllamaGeneration:
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise field_error("format", f'format={self.format!r} is not valid. Allowed: "json", or a JSON schema.')
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs is allowed only with logprobs=true.")
        return self


class OllamaCall(StrictModel):
    """A tool call of the model: its function's name, and its arguments as an object."""

    class Function(StrictModel):
        name: str
        arguments: dict[str, Any] = Field(default_factory=dict)
        index: int | None = None
        description: str | None = None

    function: Function
    id: str | None = None
    type: str | None = None


class OllamaMessage(StrictModel):
    """Message of a conversation. images: as base64. tool_name: function whose result it is, with the role "tool"."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Texts | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaGeneration):
    """Request of `/api/chat`. Without messages it asks whether the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(default_factory=list)
    tools: Objects | None = None


class OllamaGenerateRequest(OllamaGeneration):
    """Request of `/api/generate`. Without a prompt it asks whether the model is loaded.

    raw: continue the prompt as it is, without the chat template. images: as base64.
    """

    prompt: str = ""
    images: Texts | None = None
    system: str | None = None
    raw: bool = False


class OllamaEmbedRequest(OllamaFields):
    """Request of `/api/embed`. truncate: cut texts that are too long; false refuses them."""

    input: str | Texts
    truncate: bool = True
    dimensions: int | None = None


class OllamaEmbeddingsRequest(OllamaFields):
    """Request of `/api/embeddings`, the older form of `/api/embed`. A text that is too long is cut."""

    prompt: str = ""


class OllamaShowRequest(RequestModel):
    """Request of `/api/show`. name: older name of model. verbose: accepted; tokens are not listed."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False
