"""Parameters of requests for a KV connector, and those that it returns."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.engine.output.outputs import CompletionOutput, RequestOutput
from penstock.features.kv_transfer import KVTransferPart


class _HasParams(Protocol):
    """Request with the field."""

    kv_transfer_params: dict[str, Any] | None


def kv_transfer_parts(request: _HasParams) -> list[KVTransferPart]:
    """The part of a request for the KV connector, or none."""
    given = request.kv_transfer_params
    return [] if given is None else [KVTransferPart(params=given)]


def kv_transfer_field(output: RequestOutput | CompletionOutput) -> dict[str, Any]:
    """Field of a response, or of the chunk that ends a choice, with what the KV connector returns; or none."""
    params = output.kv_transfer_params
    return {} if params is None else {"kv_transfer_params": params}
