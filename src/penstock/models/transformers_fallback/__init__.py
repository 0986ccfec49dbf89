"""Models that have no file here, run by their own implementation in Transformers on this engine's paged attention."""

from penstock.models.transformers_fallback.model import TransformersForCausalLM

__all__ = ["TransformersForCausalLM"]
