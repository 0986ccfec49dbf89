"""Requests and responses of the pooling routes: embeddings, scores, classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, model_validator

from penstock.contract.param_checks import shown
from penstock.server.protocol.base import RequestModel, Texts, field_error
from penstock.server.protocol.other_fields import POOLING_OTHER_FIELDS, OtherField


def listed_inputs(name: str, value: Any) -> list[str | list[int]]:
    """Texts of a field: text, token ids, or a list of these. name: of the field."""
    listed: list[Any] = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    if listed and all(type(item) is int for item in listed):
        listed = [listed]
    is_valid = bool(listed) and (
        all(isinstance(item, str) for item in listed)
        or all(isinstance(item, list) and all(type(id) is int for id in item) for item in listed)
    )
    if not is_valid:
        given = f"{name} is an empty list" if value == [] else f"{name}={shown(value)} is not valid"
        raise field_error(name, f"{given}. Allowed: text, a list of token ids, or a list of texts or of such lists.")
    return listed


Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(
        lambda value: listed_inputs("input", value),
        json_schema_input_type=str | list[int] | list[str] | list[list[int]],
    ),
]
OneOrMore = str | Texts


class PoolingFields(RequestModel):
    """Fields that the pooling routes share, by the names of `PoolingParams`.

    timeout: seconds after which the request is aborted with status 408. request_id: as of completions.
    """

    other_fields: ClassVar[Mapping[str, OtherField]] = POOLING_OTHER_FIELDS

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    priority: int = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class _InputFields(PoolingFields):
    """input: texts or token ids. add_special_tokens: put the tokenizer's special tokens around texts."""

    input: Inputs
    add_special_tokens: bool = True


class EmbeddingRequest(_InputFields):
    """encoding_format: "base64" is little-endian float32. prompt_name: of the model's prompts, put before texts.

    messages: a conversation in place of `input`, as the chat template writes it, or the image or text of a model that
        embeds both. add_generation_prompt: end it with the beginning of an answer.
    """

    input: Inputs = Field(default_factory=list)
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = False
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None

    @model_validator(mode="after")
    def _check_input(self) -> EmbeddingRequest:
        if (self.messages is None) == (not self.input):
            what = "is missing" if self.messages is None else "is given beside messages"
            raise field_error("input", f"input {what}. Give one of input and messages.")
        if self.messages is not None and self.prompt_name is not None:
            raise field_error("prompt_name", "prompt_name is for input, and messages are given. Leave one out.")
        return self


class PoolingRequest(_InputFields):
    """task: None takes the model's first."""

    task: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class ClassifyRequest(_InputFields):
    """Request of `/classify`."""


class ScoreRequest(PoolingFields):
    """Request to score one of `text_1` with each of `text_2`, or pair by pair. chat_template: of a reranker."""

    text_1: OneOrMore
    text_2: OneOrMore
    chat_template: str | None = None


class RerankRequest(PoolingFields):
    """top_n: number of documents in the answer; absent or 0 for all. return_documents: whether it has their texts."""

    query: str
    documents: Texts
    top_n: int | None = None
    return_documents: bool = True
    chat_template: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class _List(BaseModel):
    id: str
    object: str
    created: int
    model: str
    usage: _Usage


class EmbeddingData(BaseModel):
    index: int
    object: str
    embedding: list[float] | str


class EmbeddingResponse(_List):
    data: list[EmbeddingData]


class PoolingData(BaseModel):
    index: int
    object: str
    data: list[Any] | str


class PoolingResponse(_List):
    data: list[PoolingData]


class ClassifyData(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(_List):
    data: list[ClassifyData]


class ScoreData(BaseModel):
    index: int
    object: str
    score: float


class ScoreResponse(_List):
    data: list[ScoreData]


class RerankDocument(BaseModel):
    text: str


class RerankResult(BaseModel):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(BaseModel):
    id: str
    model: str
    usage: _Usage
    results: list[RerankResult]
