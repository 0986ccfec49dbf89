"""Request of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.server.protocol.base import (
    GenerationFields,
    JsonObjectFormat,
    Objects,
    StrictModel,
    TextFormat,
    Texts,
    field_error,
)
from penstock.server.protocol.other_fields import RESPONSES_OTHER_FIELDS, OtherField

LOGPROBS = "message.output_text.logprobs"


class FlatJsonSchemaFormat(StrictModel):
    """A JSON schema with its name. strict: changes nothing, since a schema is always enforced."""

    type: Literal["json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """Options of the answer's text. verbosity: accepted without an effect."""

    format: Annotated[TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | None, Field(discriminator="type")] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(StrictModel):
    """Options of reasoning. effort: a variable of the chat template; "none" sets enable_thinking to false as well.

    summary, generate_summary: accepted without an effect; the reasoning itself is returned. context, mode: only their
    defaults.
    """

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(StrictModel):
    """Options of a stream. include_obfuscation: accepted; nothing is obfuscated."""

    include_obfuscation: bool = False


class ResponsesRequest(GenerationFields):
    """Request of a response.

    input: a text, or items: messages, function calls and their outputs, and reasoning.
    previous_response_id: a stored response, whose conversation the input goes on with.
    background: answer before the response has run; the client reads it from the store later.
    store: keep the response, for `previous_response_id` and `GET /v1/responses/{id}`.
    include: "message.output_text.logprobs" returns log-probabilities; "reasoning.encrypted_content" changes nothing.
    max_output_tokens: without it, as many as fit.
    """

    other_fields: ClassVar[Mapping[str, OtherField]] = RESPONSES_OTHER_FIELDS

    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool = False
    store: bool = True
    max_output_tokens: int | None = None
    stop: str | Texts | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    top_logprobs: int | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_response(self) -> ResponsesRequest:
        if self.input == [] and self.previous_response_id is None:
            raise field_error("input", "input is an empty list. Allowed: text, or at least one item.")
        if self.top_logprobs and LOGPROBS not in self.include:
            raise field_error("top_logprobs", f"top_logprobs is allowed only with include=[{LOGPROBS!r}].")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise field_error("tool_choice", "tool_choice is allowed only with tools.")
        if self.background and self.stream:
            raise field_error("background", "background=true is allowed only without stream=true.")
        if self.background and not self.store:
            raise field_error("background", "background=true is allowed only with store=true, where it is read.")
        if self.background and self.return_hidden_states:
            raise field_error(
                "return_hidden_states",
                "return_hidden_states is allowed only without background=true: stored responses have no hidden states.",
            )
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "stream_options is allowed only with stream=true.")
        if self.text is not None and self.text.format is not None and self.structured_outputs is not None:
            raise field_error("text.format", "There are text.format and structured_outputs. Give one of them.")
        return self
