"""Parameters of requests for a KV connector, and those that it returns."""

from __future__ import annotations

from typing import Any

from penstock.engine.output.outputs import RequestOutput
from penstock.features.kv_connector.messages import KVTransferPart
from penstock.server.protocol.base import SamplingFields


def kv_transfer_parts(request: SamplingFields) -> list[KVTransferPart]:
    """The part of a request for the KV connector, or none."""
    given = request.kv_transfer_params
    return [] if given is None else [KVTransferPart(params=given)]


def kv_transfer_field(output: RequestOutput) -> dict[str, Any]:
    """Field of a response with what the KV connector returns, or none."""
    params = output.kv_transfer_params
    return {} if params is None else {"kv_transfer_params": params}
