"""The model of chats: its tokenizer, chat template, options and default parameters, with an engine or before one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from penstock.contract import SamplingParams
from penstock.engine.inputs.conversation import Message, render_prompt
from penstock.engine.inputs.prompts import PromptDict
from penstock.errors import InvalidRequest
from penstock.server.answers.template_tools import TemplateTools, template_tools
from penstock.server.answers.tool_parsers import tool_call_format
from penstock.server.http.errors import ApiError
from penstock.server.options import ServerOptions
from penstock.server.start_checks import template_source
from penstock.text.tokenizer import Tokenizer


class ChatModel:
    """Model that requests and their answers belong to. Raises ConfigError for options that do not fit it.

    default_params: sampling parameters of fields that a request leaves out.
    """

    def __init__(self, tokenizer: Tokenizer, options: ServerOptions, default_params: SamplingParams) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.default_params = default_params
        self.names = options.served_model_name
        self._template = template_source(options, tokenizer)
        # A template without the role would refuse it, or show it.
        self._knows_developer = "developer" in str(self.chat_template)

    @property
    def name(self) -> str:
        """Name in responses."""
        return self.names[0]

    @property
    def chat_template(self) -> Any:
        """Chat template: that of the server's options, else the tokenizer's: text, several by name, or None."""
        return self._template or self.tokenizer.templates.own

    def render(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> PromptDict:
        """Prompt of a conversation. It takes some milliseconds. Raises InvalidRequest as `render_prompt`."""
        template = self._trusted(chat_template)
        parser = self.options.tool_call_parser
        if parser is None and tools:
            parser = self.template_tools(chat_template).parser
        if not self._knows_developer and chat_template is None:
            messages = [_as_system(message) for message in messages]
        return render_prompt(
            self.tokenizer,
            messages,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            write_calls=tool_call_format(parser, self.tokenizer).written,
            chat_template_kwargs={**self.options.default_chat_template_kwargs, **variables},
            chat_template_content_format=self.options.chat_template_content_format,
        )

    def template_tools(self, chat_template: str | None) -> TemplateTools:
        """Knowledge of tools that the template of a request has. It takes some milliseconds. Raises as `render`."""
        if chat_template is None:
            return self._own_template_tools
        return self._tools_of(self._trusted(chat_template))

    def takes_tools(self) -> bool:
        """Whether the model itself may decide on calls of tools. It takes some milliseconds."""
        if self.options.tool_call_parser is not None:
            return self.options.enable_auto_tool_choice
        try:
            return self.template_tools(None).has_known_calls
        except InvalidRequest:
            # It has no template.
            return False

    @cached_property
    def _own_template_tools(self) -> TemplateTools:
        return self._tools_of(self._template)

    def _tools_of(self, template: str | None) -> TemplateTools:
        return template_tools(self.tokenizer, template, self.options.reasoning_parser)

    def _trusted(self, chat_template: str | None) -> str | None:
        """Template of a request, which may bring one if the server allows that."""
        if chat_template is not None and not self.options.trust_request_chat_template:
            message = "chat_template is not accepted from requests. Start the server with trust_request_chat_template."
            raise ApiError(400, message, param="chat_template")
        return self._template if chat_template is None else chat_template


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message.get("role") == "developer" else message
