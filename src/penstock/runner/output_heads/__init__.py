"""Output heads: from a step's hidden states to its results, one file per kind."""

from penstock.runner.output_heads.base import HeadFactory, HeadServices, OutputHead
from penstock.runner.output_heads.earlier_stage import EarlierStage
from penstock.runner.output_heads.generation import Generation

__all__ = ["EarlierStage", "Generation", "HeadFactory", "HeadServices", "OutputHead"]
