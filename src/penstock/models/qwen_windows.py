"""How Qwen configurations say which layers have a sliding window."""

from __future__ import annotations

from penstock.models.config_fields import ConfigFields

_FULL, _SLIDING = "full_attention", "sliding_attention"
# What a configuration without these fields means.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_qwen_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    """Each layer's window, None for full attention.

    Without `use_sliding_window` there are none. With it, `layer_types` names each layer's kind, or else the layers
    from `max_window_layers` on have one.
    """
    window = None
    if fields.flag("use_sliding_window", default=False):
        window = fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW)
    kinds = fields.layer_types(num_layers)
    if kinds is None:
        first = fields.count("max_window_layers", default=_DEFAULT_MAX_WINDOW_LAYERS)
        return [window if layer >= first else None for layer in range(num_layers)]
    if not set(kinds) <= {_FULL, _SLIDING}:
        raise fields.unsupported("layer_types", kinds, f"{_FULL}, {_SLIDING}")
    if _SLIDING in kinds and window is None:
        raise fields.unsupported("layer_types", kinds, f"{_FULL} alone, unless use_sliding_window gives a window")
    return [window if kind == _SLIDING else None for kind in kinds]
