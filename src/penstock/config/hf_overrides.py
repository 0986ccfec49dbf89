"""Option `hf_overrides`: fields that replace those of `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoints.json_file import parse_json_text, shown
from penstock.errors import ConfigError

# End of the names of fields that are configurations themselves, such as `text_config`.
_NESTED = "_config"
_OLD_ROPE = {"rope_scaling", "rope_theta"}
# Rotary settings that do not belong to the scaling.
_NOT_SCALING = ("rope_theta", "partial_rotary_factor")


def with_overrides(hf_config: Mapping[str, Any], given: Any) -> Mapping[str, Any]:
    """Content of `config.json` with the fields of the option: a dictionary, or one as JSON; None for none.

    Fields of nested configurations are replaced one by one, all others as they are. Rotary settings replace those of
    either form, of Transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`), but for a base that they
    leave out. Raises ConfigError for another value of the option.
    """
    overrides = _read(given)
    changed = _replaced(hf_config, overrides)
    if overrides.keys() & _OLD_ROPE and isinstance(hf_config.get("rope_parameters"), Mapping):
        changed = {name: value for name, value in changed.items() if name not in _OLD_ROPE}
        changed["rope_parameters"] = _rope_parameters(hf_config["rope_parameters"], overrides)
    elif "rope_parameters" in overrides:
        changed.pop("rope_scaling", None)
    return changed


def _rope_parameters(before: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of Transformers 5 with the changes of Transformers 4's fields."""
    given = sorted(overrides.keys() & _OLD_ROPE)
    if any(isinstance(one, Mapping) for one in before.values()):
        raise ConfigError(
            f"hf_overrides has {' and '.join(given)}, but config.json has rope_parameters for each kind of layer "
            f"({', '.join(before)}). Give rope_parameters, whole."
        )
    settings = dict(before)
    if "rope_scaling" in overrides:
        kept = {name: before[name] for name in _NOT_SCALING if name in before}
        settings = {**kept, "rope_type": "default", **(overrides["rope_scaling"] or {})}
    return settings | ({"rope_theta": overrides["rope_theta"]} if "rope_theta" in overrides else {})


def _read(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    try:
        fields = parse_json_text(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ConfigError(f"hf_overrides={shown(given)} is not JSON: {error}.") from error
    if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
        what = "a function" if callable(fields) else shown(fields)
        raise ConfigError(
            f'hf_overrides is {what}. Allowed: a dictionary of fields of config.json, such as {{"rope_theta": 1e6}}.'
        )
    return fields


def _replaced(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**fields, **changes}
    for name, value in changes.items():
        if name.endswith(_NESTED) and isinstance(value, Mapping) and isinstance(fields.get(name), Mapping):
            changed[name] = _replaced(fields[name], value)
    return changed
