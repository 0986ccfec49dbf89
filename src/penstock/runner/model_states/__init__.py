"""Model states: they make a model's inputs of a step's batch, one file per kind."""

from penstock.runner.model_states.base import ModelState
from penstock.runner.model_states.decoder import DecoderModelState

__all__ = ["DecoderModelState", "ModelState"]
