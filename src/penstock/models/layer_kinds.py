"""Attention type of each layer, full or sliding window, from the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.models.config_fields import ConfigFields

FULL, SLIDING = "full_attention", "sliding_attention"


def read_layer_kinds(fields: ConfigFields, default: Sequence[str]) -> list[str]:
    """Return `FULL` or `SLIDING` for every layer; `default` for an absent field.

    Raises UnsupportedFeature for other types.
    """
    kinds = fields.layer_types(len(default))
    if kinds is None:
        return list(default)
    if not set(kinds) <= {FULL, SLIDING}:
        raise fields.unsupported("layer_types", kinds, f"{FULL}, {SLIDING}")
    return kinds


def windows_of(fields: ConfigFields, kinds: Sequence[str], window: int | None) -> list[int | None]:
    """Return the window of each layer, None for full attention. Raises UnsupportedFeature for a missing window."""
    if SLIDING in kinds and window is None:
        raise fields.unsupported("sliding_window", window, f"a positive integer, since some layers are {SLIDING}")
    return [window if kind == SLIDING else None for kind in kinds]
