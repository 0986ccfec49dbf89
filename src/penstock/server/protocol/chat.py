"""Request of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from penstock.server.protocol.base import Objects, SamplingFields, StrictModel, field_error


def _functions(**required: Any) -> WithJsonSchema:
    """Schema of a list of functions, for the OpenAPI document: the conversation's own checks have clearer errors."""
    name = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"}
    function = {"type": "object", "properties": {"name": name, **required}, "required": ["name", *required]}
    item = {"type": "object", "properties": {"type": {"const": "function"}, "function": function}}
    return WithJsonSchema({"type": "array", "items": {**item, "required": ["type", "function"]}})


# Arguments are an object as JSON text.
Calls: TypeAlias = Annotated[Objects, _functions(arguments={"type": "string", "contentMediaType": "application/json"})]
Tools: TypeAlias = Annotated[Objects, _functions()]


class ChatMessage(BaseModel):
    """Message of a conversation. Further fields are given to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: str
    content: str | Annotated[list[str | dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: Calls | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """Text of the content, as templates get it."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(
            part if isinstance(part, str) else str(part.get("text", part.get("refusal", ""))) for part in self.content
        )


Messages: TypeAlias = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class TemplateFields(StrictModel):
    """Fields of the template that renders a conversation. documents: one of its variables."""

    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None

    @model_validator(mode="after")
    def _check_end(self) -> TemplateFields:
        is_asked = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and is_asked:
            message = "continue_final_message=true goes on with a message; add_generation_prompt=true begins another."
            raise field_error("continue_final_message", message)
        return self

    @property
    def begins_message(self) -> bool:
        """Whether the prompt ends with the beginning of an answer."""
        return self.add_generation_prompt and not self.continue_final_message


class ChatCompletionRequest(TemplateFields, SamplingFields):
    """Request of a chat completion. max_completion_tokens, max_tokens: without them, as many as fit.

    echo: with continue_final_message, the answer begins with the message that it continues.
    mm_processor_kwargs: options of the processor of images, audio and video.
    include_reasoning: whether reasoning is returned. reasoning_effort: a variable of the chat template.
    """

    messages: Messages
    add_special_tokens: bool = False
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    echo: bool = False
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs is allowed only with logprobs=true.")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            message = "There are max_completion_tokens and max_tokens, which are not equal. Give one of them."
            raise field_error("max_completion_tokens", message)
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise field_error("tool_choice", "tool_choice is allowed only with tools.")
        return self
