"""Parameters of requests for what moves their blocks of the KV cache, and those that it returns at their end."""

from __future__ import annotations

from typing import Any

from penstock.config import EngineConfig
from penstock.contract.feature import Feature
from penstock.contract.parts import OutputPart, Part


class KVTransferPart(Part, frozen=True, kw_only=True):
    """Parameters of a request, with the names that the KV connector or a proxy gives them."""

    feature = "kv_transfer"
    params: dict[str, Any]


class KVTransferResult(OutputPart, frozen=True, kw_only=True):
    """Parameters that are returned with the end of a request."""

    feature = "kv_transfer_params"
    params: dict[str, Any]

    def result(self, num_tokens: int) -> dict[str, Any]:
        return self.params


def _moves_blocks(config: EngineConfig) -> bool:
    return config.kv_connector.connector is not None or config.kv_tiers.folder is not None


FEATURE = Feature(
    name="kv_transfer_params",
    is_on=_moves_blocks,
    parts=(KVTransferPart, KVTransferResult),
    how_to_turn_on="Start the engine with kv_transfer_config, which names a KV connector, or with kv_offload_dir.",
)
