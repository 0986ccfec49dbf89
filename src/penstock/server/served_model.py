"""The model behind the HTTP API: its engine, tokenizer, names and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from typing import TypeVar

from penstock.contract.param_checks import shown
from penstock.engine.async_engine import AsyncEngine
from penstock.features.lora.request import AdapterPart, LoRARequest, parts_of_adapter
from penstock.server.chat_model import ChatModel
from penstock.server.http.errors import ApiError
from penstock.server.options import ServerOptions
from penstock.server.served_adapters import ServedAdapters
from penstock.server.start_checks import check_parsers
from penstock.server.tracing import NoTracing, Tracing, otlp_tracing

_Result = TypeVar("_Result")


class ServedModel(ChatModel):
    """Served model: what routes need of its engine.

    Raises ConfigError for options that do not fit the model.

    max_model_len: longest context in tokens. adapter: LoRA adapter that a request has named as its model.
    """

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        check_parsers(options, engine.own_tokenizer)
        super().__init__(engine.own_tokenizer, options, engine.get_default_sampling_params())
        self.engine = engine
        self.max_model_len = engine.max_model_len
        self.adapters = ServedAdapters(engine, options.adapters, self.names)
        self.adapter: LoRARequest | None = None
        options.check_adapters(has_adapters=engine.has_adapters)
        endpoint = options.otlp_traces_endpoint
        self.tracing: Tracing = NoTracing() if endpoint is None else otlp_tracing(endpoint)

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


async def _in_thread(work: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(work)
