"""What makes a model's inputs of a step's batch, one file per way."""

from penstock.runner.model_states.base import ModelState
from penstock.runner.model_states.decoder import DecoderModelState

__all__ = ["DecoderModelState", "ModelState"]
