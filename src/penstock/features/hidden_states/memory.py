"""Memory of a step's hidden states: the scheduler's side bounds it, and the memory plan counts it. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.config import EngineConfig
from penstock.features.hidden_states import FEATURE, HiddenStatesOptions

if TYPE_CHECKING:
    import torch

    from penstock.models.interface import LanguageModel

# Sizes are counted for the widest dtype, since the scheduler does not know the model's.
BYTES_PER_NUMBER = 4


def step_bytes(config: EngineConfig, layers: Collection[int]) -> int:
    """Bytes, in float32, of the states that the requests of a full step read: as noted, and as copied for the host.

    layers: numbers from 0 to the number of layers, whose states the forward pass returns without being asked.
    """
    num_states = len(set(layers) - {config.model.num_layers}) + len(layers)
    return num_states * config.scheduler.max_num_batched_tokens * config.model.hidden_size * BYTES_PER_NUMBER


def most_step_bytes(config: EngineConfig, model: LanguageModel, _kind: str, dtype: torch.dtype) -> int:
    """Most bytes of a step's states, for the memory plan. See `Feature.memory`."""
    options: HiddenStatesOptions = FEATURE.options_of(config)
    if not options.max_output_bytes:
        return 0
    last = config.model.num_layers
    has_others = getattr(model, "notes_layers", False) and config.parallel.pipeline_parallel_size == 1
    of_model = step_bytes(config, range(0 if has_others else last, last + 1))
    return min(of_model, options.max_step_bytes) * dtype.itemsize // BYTES_PER_NUMBER
