"""Structured output: grammars of constrained requests, followed beside the forward pass, and their bitmasks."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature
from penstock.features.structured_output.messages import BitmaskPart


def _generates(config: EngineConfig) -> bool:
    return config.model.pooling is None


FEATURE = Feature(
    name="structured outputs",
    is_on=_generates,
    parts=(BitmaskPart,),
    scheduler_side="penstock.features.structured_output.scheduling:StructuredOutputScheduling",
    worker_side="penstock.features.structured_output.bitmask:BitmaskWorker",
)
