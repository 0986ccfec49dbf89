"""Requests of `/v1/messages` and `/v1/messages/count_tokens`, in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.server.protocol.base import GenerationFields, Objects, StrictModel, Texts, field_error
from penstock.server.protocol.other_fields import MESSAGES_OTHER_FIELDS, OtherField


class InputMessage(StrictModel):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Objects


class InputTool(StrictModel):
    """A tool that the client runs. The fields from cache_control on are accepted without an effect."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None


class ToolUseChoice(StrictModel):
    """Whether the answer may or must call tools. name: of the tool, with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(StrictModel):
    """Whether the model reasons: the variable enable_thinking of the chat template; "adaptive" leaves it to the model.

    budget_tokens: limit of the reasoning, where the server has a reasoning parser. display: accepted without an effect.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    """Form of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputOptions(StrictModel):
    """Options of the answer. effort: the variable reasoning_effort of the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesFields(GenerationFields):
    """Fields of a conversation. output_format: older name of output_config.format."""

    other_fields: ClassVar[Mapping[str, OtherField]] = MESSAGES_OTHER_FIELDS

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: str | Objects | None = None
    tools: Annotated[list[InputTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    output_format: OutputFormat | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_messages(self) -> MessagesFields:
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not self.tools:
            raise field_error("tool_choice", "tool_choice is allowed only with tools.")
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise field_error("tool_choice.name", 'tool_choice.name belongs to the type "tool", which needs it.')
        if self.format is not None and self.structured_outputs is not None:
            raise field_error("output_config.format", "There are a format and structured_outputs. Give one of them.")
        return self

    @property
    def format(self) -> OutputFormat | None:
        """Form of the answer's text, by either name."""
        return self.output_format or (None if self.output_config is None else self.output_config.format)


class MessagesRequest(MessagesFields):
    """Request of an answer. max_tokens: at most so many tokens; the context may end it before."""

    max_tokens: int
    stop_sequences: Texts | None = None


class CountTokensRequest(MessagesFields):
    """Request for the number of a conversation's tokens."""
