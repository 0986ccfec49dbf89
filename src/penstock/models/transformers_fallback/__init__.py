"""Models that have no file here, run by their own implementation in Transformers on this engine's paged attention."""

from penstock.models.transformers_fallback.model import TransformersForCausalLM, refuse_unsuitable

__all__ = ["TransformersForCausalLM", "refuse_unsuitable"]
