"""Rotary embedding by kind of layer: full attention and sliding windows have bases of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import ModelError
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import FULL, ConfigFields


def read_rope_of_kind(
    fields: ConfigFields, kind: str, old_fields: Mapping[str, tuple[str, float]], head_size: int
) -> RopeParameters:
    """Read the rotary embedding of one kind of layer.

    Transformers 5 has `rope_parameters` with an object for each kind. Older files have a base for each, and
    `rope_scaling` for full attention only.
    old_fields: the old field of the base and its default, by kind.
    Raises ModelError for invalid fields, UnsupportedFeature for an unknown `rope_type`.
    """
    by_kind = _object(fields, "rope_parameters")
    if not set(by_kind) <= set(old_fields) or not all(isinstance(value, Mapping | None) for value in by_kind.values()):
        raise ModelError(
            f"{fields.source} has rope_parameters={by_kind!r}. "
            f"It must have an object for each kind of layer: {', '.join(old_fields)}."
        )
    settings = dict(by_kind.get(kind) or {})
    if kind == FULL:
        settings.update(_object(fields, "rope_scaling"))
    old_field, default = old_fields[kind]
    settings.setdefault("rope_theta", fields.number(old_field, default=default))
    others = ("rope_parameters", "rope_scaling", "rope_theta")
    content = {name: value for name, value in fields.hf_config.items() if name not in others}
    return read_rope_parameters(
        {**content, "rope_parameters": settings}, head_size=head_size, num_positions=fields.num_positions
    )


def _object(fields: ConfigFields, name: str) -> Mapping[str, Any]:
    value = fields.hf_config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{fields.source} has {name}={value!r}. It must be an object.")
    return value
