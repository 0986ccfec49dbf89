"""Base of the requests' models, and fields that several routes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.param_checks import shown
from penstock.server.protocol.other_fields import OTHER_FIELDS, OtherField

# Type of validation errors that carry the name of their field as `param`.
FIELD_ERROR = "penstock_field"


def field_error(param: str, message: str) -> PydanticCustomError:
    """Error of a validator about a field: its name, and the whole text."""
    return PydanticCustomError(FIELD_ERROR, "{message}", {"param": param, "message": message})


class StrictModel(BaseModel):
    """Base of nested objects: unknown fields and values of other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), frozen=True)


def _describe_other_fields(schema: dict[str, Any], model: type[RequestModel]) -> None:
    """Add a request's `other_fields` to its schema."""
    for name, field in model.other_fields.items():
        described: dict[str, Any] = {"description": f"Accepted without an effect, or refused: {field.why}."}
        if field.allowed is not None:
            described["enum"] = [*field.allowed, None]
        schema["properties"].setdefault(name, described)


class RequestModel(StrictModel):
    """Base of request bodies. A field of null counts as absent.

    other_fields: fields that are accepted without an effect, or refused.
    """

    model_config = ConfigDict(json_schema_extra=_describe_other_fields)
    other_fields: ClassVar[Mapping[str, OtherField]] = OTHER_FIELDS

    @model_validator(mode="before")
    @classmethod
    def _take_other_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in body.items() if value is not None}
        for name in cls.other_fields.keys() & (given.keys() - cls.model_fields.keys()):
            value, field = given.pop(name), cls.other_fields[name]
            if not field.allows(value):
                raise field_error(name, f"{name}={shown(value)} is not available: {field.why}.")
        # One unknown field is reported; a request may have millions.
        for name in [name for name in given if name not in cls.model_fields][1:]:
            del given[name]
        return given


# Lists whose validation ends at the first error, since a request may have millions of items.
TokenIds: TypeAlias = Annotated[list[int], Field(fail_fast=True)]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True)]
Objects: TypeAlias = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# Checked with the other sampling parameters, up to the first error.
Biases: TypeAlias = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
]


class StreamOptions(StrictModel):
    """Options of a stream. include_usage: a last chunk with the usage. continuous_usage_stats: usage in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    # Obfuscation pads OpenAI's chunks against observers of encrypted connections; there is none here.
    include_obfuscation: bool = False


class JsonSchemaFormat(StrictModel):
    """A JSON schema with its name.

    strict: changes nothing, since a schema is always enforced. unenforced: as in `StructuredOutputsParams`.
    """

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None
    unenforced: str | None = None


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class JsonSchemaResponseFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class GrammarFormat(StrictModel):
    """Text of a context-free grammar, in Lark's notation or GBNF."""

    type: Literal["grammar"]
    grammar: str


class StructuralTagFormat(BaseModel):
    """Text with parts that follow schemas; its fields are checked with the structural tag."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    type: Literal["structural_tag"]


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaResponseFormat | GrammarFormat | StructuralTagFormat,
    Field(discriminator="type"),
]


class GenerationFields(RequestModel):
    """Fields that every generating API has, by the names of `SamplingParams`; absent ones take the engine's defaults.

    timeout: seconds after which the request is aborted. It gets status 408 if nothing was sent.
    return_hidden_states: "last" (also true) or "all": tokens whose hidden states an answer has.
    hidden_states_layers: their layers; absent, the output of the final norm. encoding_format: of them.
    """

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    num_speculative_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    priority: int = 0
    cache_salt: str | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    return_hidden_states: bool | Literal["last", "all"] = False
    hidden_states_layers: Annotated[list[int], Field(fail_fast=True)] | None = None
    encoding_format: Literal["float", "base64"] | None = None

    @model_validator(mode="after")
    def _check_hidden_states(self) -> GenerationFields:
        if self.encoding_format is not None and not self.return_hidden_states:
            raise field_error("encoding_format", "encoding_format is allowed only with return_hidden_states.")
        return self


class SamplingFields(GenerationFields):
    """Fields of chat completions and completions.

    timeout: a stream that it ends has finish_reason "abort".
    request_id: replaces the random part of the response's id; two requests that run at once cannot share one.
    kv_transfer_params: what the engine's KV connector, which alone knows them, does with the request's blocks.
    """

    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | Texts | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "stream_options is allowed only with stream=true.")
        if self.stream and self.prompt_logprobs is not None:
            raise field_error("prompt_logprobs", "prompt_logprobs is allowed only without stream=true.")
        if self.response_format is not None and self.structured_outputs is not None:
            raise field_error("response_format", "There are response_format and structured_outputs. Give one of them.")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def repeats_usage(self) -> bool:
        """Whether each chunk has the usage so far."""
        return self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats
