"""Sliding windows in Qwen configurations."""

from __future__ import annotations

from penstock.models.config_fields import ConfigFields
from penstock.models.layer_kinds import FULL, SLIDING, read_layer_kinds

# Defaults of absent fields.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_qwen_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    """Return the window of each layer, None for full attention.

    Windows need `use_sliding_window`. Then `layer_types` names the layers, or else those from `max_window_layers` on.
    """
    window = None
    if fields.flag("use_sliding_window", default=False):
        window = fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW)
    first = fields.count("max_window_layers", default=_DEFAULT_MAX_WINDOW_LAYERS)
    from_first_on = [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]
    kinds = read_layer_kinds(fields, default=from_first_on)
    if SLIDING in kinds and window is None:
        raise fields.unsupported("layer_types", kinds, f"{FULL} alone, unless use_sliding_window gives a window")
    return [window if kind == SLIDING else None for kind in kinds]
