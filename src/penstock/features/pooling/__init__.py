"""Pooling: embeddings, classes and scores instead of tokens."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.config.pooling import POOL
from penstock.contract.feature import Feature


def _pools(config: EngineConfig) -> bool:
    return config.model.pooling is not None


FEATURE = Feature(
    name="pooling",
    is_on=_pools,
    worker_side="penstock.features.pooling.states:pooling_states",
    output_heads={POOL: "penstock.features.pooling.head:TextPooling"},
)
