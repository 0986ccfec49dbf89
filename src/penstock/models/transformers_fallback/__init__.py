"""Transformers fallback: models without a native class run their Transformers code on paged attention."""

from penstock.models.transformers_fallback.model import TransformersForCausalLM, refuse_unsuitable

__all__ = ["TransformersForCausalLM", "refuse_unsuitable"]
