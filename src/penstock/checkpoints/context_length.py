"""Longest context of a model: the positions that `config.json` names, stretched by its rotary scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

# Scalings with max_position_embeddings before the scaling. With "llama3" and "longrope" it is after the scaling.
_STRETCHING = ("linear", "dynamic", "yarn")
_LARGEST = 2**53
# Families that scale the rotary embedding of some layers only, and count that in max_position_embeddings.
_COUNTED_ALREADY = ("gemma3",)


def source_positions(hf_config: Mapping[str, Any]) -> int | None:
    """Positions of an encoder-decoder model's longest source; None where its files limit none."""
    for name in ("max_source_positions", "max_position_embeddings"):
        value = hf_config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def rope_settings(hf_config: Mapping[str, Any]) -> Any:
    """Settings of the rotary embedding, as Transformers 4 (`rope_scaling`) or 5 (`rope_parameters`) writes them."""
    return hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}


def rope_type_of(settings: Mapping[str, Any]) -> Any:
    """Rotary scaling type; "default" for none."""
    return settings.get("rope_type") or settings.get("type") or "default"


def stretched_context(hf_config: Mapping[str, Any], num_positions: int) -> int:
    """Return the longest context with rotary scaling, at least `num_positions`, as in vLLM.

    "yarn" scales the length of pretraining, which may differ from `num_positions`. Invalid settings scale nothing: the
    rotary embedding refuses them by name.
    """
    settings = rope_settings(hf_config)
    if not isinstance(settings, Mapping) or str(hf_config.get("model_type", "")).startswith(_COUNTED_ALREADY):
        return num_positions
    rope_type, original = rope_type_of(settings), num_positions
    # Early Phi-3 configurations call longrope "yarn".
    if rope_type not in _STRETCHING or "long_factor" in settings:
        return num_positions
    if rope_type == "yarn":
        name = "original_max_position_embeddings"
        original = hf_config.get(name) or settings.get(name) or num_positions
    factor = settings.get("factor")
    if not (_is_positive_number(original) and _is_positive_number(factor)):
        return num_positions
    return max(num_positions, int(original * factor))


def _is_positive_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _LARGEST
