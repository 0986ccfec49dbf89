"""Sampling parameters of requests, from their fields and the engine's defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.contract import SamplingParams, StructuredOutputsParams
from penstock.contract.structured_outputs import structured_outputs_from
from penstock.server.http.errors import ApiError
from penstock.server.protocol.base import (
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaResponseFormat,
    SamplingFields,
    StructuralTagFormat,
)

# Fields with the names and meanings of `SamplingParams`; a constraint has further forms.
_SAME = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in SamplingFields.model_fields and name != "structured_outputs"
)
# Clients' names of parameters in errors, by the engine's.
CLIENT_NAMES = {"extra_args": "vllm_xargs"}
FORMAT_NAMES = {
    "structured_outputs.json": "response_format.json_schema.schema",
    "structured_outputs.unenforced": "response_format.json_schema.unenforced",
    "structured_outputs": "response_format",
}


def sampling_params(request: SamplingFields, defaults: SamplingParams, **changes: Any) -> SamplingParams:
    """Parameters of a request. changes: those that routes name differently.

    Raises InvalidParameter.
    """
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.vllm_xargs is not None:
        given["extra_args"] = request.vllm_xargs
    given["structured_outputs"] = structured_outputs(request, defaults.structured_outputs)
    return msgspec.structs.replace(defaults, **(given | changes))


def structured_outputs(
    request: SamplingFields, default: StructuredOutputsParams | None = None
) -> StructuredOutputsParams | None:
    """Constraint of a request's fields `response_format` or `structured_outputs`, or the default without either.

    Raises InvalidParameter.
    """
    if request.response_format is None and request.structured_outputs is None:
        return default
    match request.response_format:
        case JsonObjectFormat():
            return StructuredOutputsParams(json_object=True)
        case JsonSchemaResponseFormat(json_schema=given):
            if given.schema_ is None:
                param = "response_format.json_schema.schema"
                raise ApiError(400, f"{param} is missing.", param=param)
            return StructuredOutputsParams(json=given.schema_, unenforced=given.unenforced)  # type: ignore[arg-type]
        case GrammarFormat(grammar=text):
            return StructuredOutputsParams(grammar=text)
        case StructuralTagFormat() as tag:
            return StructuredOutputsParams(structural_tag=tag.model_dump())  # type: ignore[arg-type]
    return structured_outputs_from(request.structured_outputs)


def client_names(request: SamplingFields) -> dict[str, str]:
    """Names of parameters in errors, by the engine's names."""
    return CLIENT_NAMES | (FORMAT_NAMES if request.response_format is not None else {})


def chat_max_tokens(asked: int | None, defaults: SamplingParams) -> int | None:
    """Limit of a chat's answer: None, as many as fit, unless the request or the model's files have one."""
    if asked is not None:
        return asked
    is_from_files = defaults.max_tokens != SamplingParams().max_tokens
    return defaults.max_tokens if is_from_files else None
