"""Messages of KV connectors: what a step tells the workers, and what they answer."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.contract.parts import Part


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
    worker_meta, stats: the connector's own.
    """

    sent: set[str]
    received: set[str]
    invalid_block_ids: set[int]
    worker_meta: Any = None
    stats: Any = None
