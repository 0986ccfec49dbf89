"""Requests and responses of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from penstock.server.protocol.base import RequestModel, TokenIds, field_error
from penstock.server.protocol.chat import Messages, TemplateFields


class TokenizeRequest(TemplateFields, RequestModel):
    """Text or conversation to tokenise: `prompt` or `messages`. return_token_strs: the tokens as text too.

    add_special_tokens: the default is true for a prompt, and false for messages.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "Give either prompt or messages.")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        is_null, is_given = {"type": "null"}, {"not": {"type": "null"}}
        schema["oneOf"] = [
            {"required": [given], "properties": {given: is_given, other: is_null}}
            for given, other in (("prompt", "messages"), ("messages", "prompt"))
        ]
        return schema


class DetokenizeRequest(RequestModel):
    """Token ids to write as text, special tokens included."""

    model: str | None = None
    tokens: TokenIds


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str
