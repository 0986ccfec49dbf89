"""Model states: builders of a model's inputs from a step's batch, one file per kind."""

from penstock.runner.model_states.base import ModelState
from penstock.runner.model_states.decoder import DecoderModelState

__all__ = ["DecoderModelState", "ModelState"]
