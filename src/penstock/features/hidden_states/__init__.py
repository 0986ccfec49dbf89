"""Hidden states of requests that ask for them: of the last token or of all, of chosen layers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.config import EngineConfig
from penstock.config.checks import check_integer
from penstock.contract.feature import Feature
from penstock.features.hidden_states.messages import HiddenStatesPart, OutputHiddenStates, StepHiddenStates


@dataclass(frozen=True)
class HiddenStatesOptions:
    """Limits of hidden states in bytes, counted in float32; 0 refuses all requests for them.

    max_output_bytes: of one output. A request for more is refused.
    max_bytes: of the outputs of all running requests together.
    max_step_bytes: of all tokens of a step in the layers that running requests ask for, on the device; the memory plan
        has as much. A request waits until others have ended; one that needs more by itself is refused.
    """

    max_output_bytes: int = 128 << 20
    max_bytes: int = 1 << 30
    max_step_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            check_integer(field.name, getattr(self, field.name), 0)


def _generates(config: EngineConfig) -> bool:
    return not config.model.pools


FEATURE = Feature(
    name="hidden_states",
    is_on=_generates,
    parts=(HiddenStatesPart, StepHiddenStates, OutputHiddenStates),
    scheduler_side="penstock.features.hidden_states.scheduling:HiddenStatesScheduling",
    worker_side="penstock.features.hidden_states.worker:HiddenStatesOwner",
    options=HiddenStatesOptions,
    memory={"hidden states": "penstock.features.hidden_states.memory:most_step_bytes"},
    how_to_turn_on="Send the request to an engine that generates text.",
)
