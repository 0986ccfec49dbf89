"""Requests of TEI's API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from penstock.contract.param_checks import shown
from penstock.server.protocol.base import RequestModel, StrictModel, Texts, field_error
from penstock.server.protocol.pooling import RerankRequest, listed_inputs


def _checked(inputs: Any) -> str | list[str] | list[list[str]]:
    """Field `inputs` of `/predict`."""
    if isinstance(inputs, str) or _is_pair(inputs):
        return inputs  # type: ignore[no-any-return]
    if isinstance(inputs, list) and inputs and all(_is_pair(one) or _is_text(one) for one in inputs):
        return inputs
    allowed = "text, two texts as a pair, or a list of lists with one text or two"
    raise field_error("inputs", f"inputs={shown(inputs)} is not valid. Allowed: {allowed}.")


def _has_texts(number: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == number and all(isinstance(one, str) for one in value)


_is_text, _is_pair = _has_texts(1), _has_texts(2)


class TeiFields(RequestModel):
    """Fields that the routes share. truncate: cut texts that are too long, at the side truncation_direction."""

    truncate: bool = False
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"

    @property
    def truncation(self) -> dict[str, Any]:
        """Fields of the pooling routes for it."""
        if not self.truncate:
            return {}
        return {"truncate_prompt_tokens": -1, "truncation_side": self.truncation_direction.lower()}


class TeiEmbedAllRequest(TeiFields):
    """Request of `/embed_all`."""

    inputs: Annotated[
        list[str | list[int]],
        PlainValidator(
            lambda value: listed_inputs("inputs", value),
            json_schema_input_type=str | list[int] | list[str] | list[list[int]],
        ),
    ]
    prompt_name: str | None = None


class TeiEmbedRequest(TeiEmbedAllRequest):
    """Request of `/embed`. normalize: whether embeddings have the length 1."""

    normalize: bool = True
    dimensions: int | None = None


class TeiSimilarityRequest(RequestModel):
    """Request of `/similarity`: a text, and those that are compared with it."""

    class Inputs(StrictModel):
        source_sentence: str
        sentences: Texts

    class Parameters(TeiFields):
        prompt_name: str | None = None

    inputs: Inputs
    parameters: Parameters = Field(default_factory=Parameters)


class TeiPredictRequest(TeiFields):
    """Request of `/predict`. raw_scores: logits of the classes in place of probabilities."""

    inputs: Annotated[
        str | list[str] | list[list[str]],
        PlainValidator(_checked, json_schema_input_type=str | list[str] | list[list[str]]),
    ]
    raw_scores: bool = False


class AnyRerankRequest(TeiFields, RerankRequest):
    """Request of `/rerank`: TEI's, with `texts`, or that of the other rerank routes, with `documents`.

    raw_scores: scores without the model's activation. return_text: whether the answer to TEI's request has the texts.
    """

    documents: Texts = Field(default_factory=list)
    texts: Texts | None = None
    raw_scores: bool = False
    return_text: bool = False
