"""Deployment side of KV tiers: calls of all cores."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract import RpcCall
from penstock.features.deployment import DeploymentFeature, DeploymentServices


class TierDeployment(DeploymentFeature):
    """Deployment side without a state: blocks are in a folder, and cores find them."""

    def __init__(self, services: DeploymentServices) -> None:
        self._call_cores = services.call_cores

    def save_kv_prefix(self, token_ids: Sequence[int]) -> list[tuple[int, list[str]]]:
        """Tokens of a prompt that are kept in whole blocks, and their files, of each core."""
        return self._call_cores(RpcCall("save_kv_prefix", (token_ids,)))
