"""Messages of KV connectors: what a request and its output carry, and what a step tells the workers."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.contract.parts import OutputPart, Part


class KVTransferPart(Part, frozen=True, kw_only=True):
    """Parameters of a request for the connector, which alone knows them."""

    feature = "kv_transfer"
    params: dict[str, Any]


class KVTransferResult(OutputPart, frozen=True, kw_only=True):
    """Parameters that the connector returns with the end of a request."""

    feature = "kv_transfer_params"
    params: dict[str, Any]

    def result(self, num_tokens: int) -> dict[str, Any]:
        return self.params


class ConnectorStep(Part, frozen=True, kw_only=True):
    """The connector's message from its scheduler side to that of the workers.

    metadata: pickled; None without any. ended: requests that have ended since the last such message.
    """

    feature = "kv_connector_step"
    may_repeat = False
    metadata: bytes | None
    ended: list[str]


class ConnectorResults(Part, frozen=True, kw_only=True):
    """Note that a step has done what its `ConnectorStep` says, on the rank that sends the results."""

    feature = "kv_connector_results"


class RankOutput(NamedTuple):
    """Transfers that the connector of one rank has ended since it was last asked.

    sent, received: requests whose blocks were saved or loaded. invalid_block_ids: blocks that could not be loaded.
    worker_meta: the connector's own.
    """

    sent: set[str]
    received: set[str]
    invalid_block_ids: set[int]
    worker_meta: Any = None
