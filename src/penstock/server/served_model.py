"""The model behind the HTTP API: its engine, tokenizer, names and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Protocol, TypeVar

from penstock.contract import SamplingParams
from penstock.contract.param_checks import shown
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.inputs.conversation import Message, render_prompt
from penstock.engine.inputs.prompts import PromptDict
from penstock.errors import InvalidRequest
from penstock.features.lora.request import AdapterPart, LoRARequest, parts_of_adapter
from penstock.server.answers.template_tools import TemplateTools, template_tools
from penstock.server.answers.tool_parsers import tool_call_format
from penstock.server.http.errors import ApiError
from penstock.server.options import ServerOptions
from penstock.server.served_adapters import ServedAdapters
from penstock.server.start_checks import check_lora, check_parsers, template_source
from penstock.server.tracing import NoTracing, Tracing, otlp_tracing
from penstock.text.tokenizer import Tokenizer

_Result = TypeVar("_Result")


class AnsweringModel(Protocol):
    """Served model as answers need it: options, tokenizer and name."""

    options: ServerOptions
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """Name in responses."""


class ServedModel:
    """Served model: what routes need of its engine.

    Raises ConfigError for options that do not fit the model.

    default_params: sampling parameters of fields that a request leaves out. max_model_len: longest context in tokens.
    adapter: LoRA adapter that a request has named as its model.
    """

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.names = options.served_model_name
        self.default_params: SamplingParams = engine.get_default_sampling_params()
        self.tokenizer: Tokenizer = engine.own_tokenizer
        self.max_model_len = engine.max_model_len
        self.adapters = ServedAdapters(engine, options.adapters, self.names)
        self.adapter: LoRARequest | None = None
        check_lora(options, has_adapters=engine.has_adapters)
        endpoint = options.otlp_traces_endpoint
        self.tracing: Tracing = NoTracing() if endpoint is None else otlp_tracing(endpoint)
        check_parsers(options, self.tokenizer)
        self._template = template_source(options, self.tokenizer)
        self._knows_developer = self._mentions_developer()

    @property
    def name(self) -> str:
        """Name in responses."""
        return self.names[0]

    @property
    def tasks(self) -> list[str]:
        """Tasks of the model: those of its pooling, or "generate"."""
        pooling = self.engine.model_config.pooling
        return ["generate"] if pooling is None else list(pooling.tasks)

    @property
    def base_name(self) -> str:
        """Name of the model itself."""
        return self.options.served_model_name[0]

    @property
    def parts(self) -> list[AdapterPart]:
        """Parts of the model's requests."""
        return parts_of_adapter(self.adapter)

    @property
    def chat_template(self) -> Any:
        """Chat template: that of the server's options, else the tokenizer's: text, several by name, or None."""
        return self._template or self.tokenizer.templates.own

    async def named(self, name: str | None) -> ServedModel:
        """The model, or the model with an adapter, that a request names; None takes the model.

        Raises ApiError for a name that is not served.
        """
        if name is None or name in self.names:
            return self
        adapter = await self.adapters.find(name)
        if adapter is None:
            served = ", ".join(map(repr, await self.all_names()))
            message = f"The model {shown(name)} is not served here. Allowed: {served}."
            raise ApiError(404, message, param="model", code="model_not_found")
        adapted = copy(self)
        adapted.adapter, adapted.names = adapter, (name,)
        return adapted

    async def all_names(self) -> list[str]:
        """Names that requests may give: of the model, and of its adapters."""
        return [*self.names, *(one.lora_name for one in await self.adapters.all())]

    async def render(
        self,
        messages: Callable[[], Sequence[Message]],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> PromptDict:
        """Prompt of a conversation. messages: made in a thread. Raises InvalidRequest as `render_prompt`."""
        template = self._trusted(chat_template)
        reads_as_system = not self._knows_developer and chat_template is None
        return await _in_thread(
            lambda: render_prompt(
                self.tokenizer,
                [_as_system(message) for message in messages()] if reads_as_system else messages(),
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                write_calls=tool_call_format(self.options.tool_call_parser, self.tokenizer).written,
                chat_template_kwargs={**self.options.default_chat_template_kwargs, **variables},
                chat_template_content_format=self.options.chat_template_content_format,
            )
        )

    def template_tools(self, chat_template: str | None) -> TemplateTools:
        """Knowledge of tools that the template of a request has. It takes some milliseconds. Raises as `render`."""
        if chat_template is None:
            return self._own_template_tools
        return template_tools(self.tokenizer, self._trusted(chat_template))

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
        return template_tools(self.tokenizer, self._template)

    def _trusted(self, chat_template: str | None) -> str | None:
        """Template of a request, which may bring one if the server allows that."""
        if chat_template is not None and not self.options.trust_request_chat_template:
            message = "chat_template is not accepted from requests. Start the server with trust_request_chat_template."
            raise ApiError(400, message, param="chat_template")
        return self._template if chat_template is None else chat_template

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids. Raises ApiError for ids outside the vocabulary."""
        return await _in_thread(lambda: self._decoded(token_ids, skip_special_tokens))

    def _decoded(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        for wrong in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= wrong < self.tokenizer.vocab_size:
                path, allowed = f"tokens[{token_ids.index(wrong)}]", f"0 to {self.tokenizer.vocab_size - 1}"
                raise ApiError(400, f"{path}={shown(wrong)} is not a token id. Allowed: {allowed}.", param=path)
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token, special tokens included."""
        return await _in_thread(lambda: [self.tokenizer.token_text(id) for id in token_ids])

    def _mentions_developer(self) -> bool:
        """Whether the chat template has the role `developer`, which it would refuse or show otherwise."""
        return "developer" in str(self.chat_template)


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


async def _in_thread(work: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(work)
