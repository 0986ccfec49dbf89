"""Step inputs of encoders: rows of the position table, and token types. Encoders ask for this feature themselves."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature


def _never(_: EngineConfig) -> bool:
    return False


FEATURE = Feature(
    name="encoder inputs", is_on=_never, worker_side="penstock.features.encoder_inputs.worker:encoder_inputs"
)
