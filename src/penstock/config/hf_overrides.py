"""Option `hf_overrides`: fields that replace those of `config.json`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from penstock.checkpoints.json_file import parse_json_text, shown
from penstock.config.checks import did_you_mean
from penstock.errors import ConfigError

logger = logging.getLogger(__name__)
# End of the names of fields that are configurations themselves, such as `text_config`.
_NESTED = "_config"
_OLD_ROPE = {"rope_scaling", "rope_theta"}
# Rotary settings that do not belong to the scaling.
_NOT_SCALING = ("rope_theta", "partial_rotary_factor")


def as_fields(given: Any, hf_config: Mapping[str, Any]) -> Any:
    """Value of the option, in which a function is replaced by the fields that it changes.

    A function gets Transformers' configuration of the model, and returns it changed. It runs here, once: workers and
    saved models have plain fields. Raises ConfigError for a function that fails or returns something else, and for
    values that JSON does not have.
    """
    if not callable(given):
        return given
    from transformers.configuration_utils import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = hf_config.get("model_type")
    # `get` of this mapping finds no class that is not imported yet.
    hf_class = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else PretrainedConfig  # noqa: SIM401
    try:
        before = hf_class.from_dict(dict(hf_config))
        fields_before = _plain_fields(before)
        after = given(before)
    except Exception as error:
        raise ConfigError(f"hf_overrides is a function that failed: {type(error).__name__}: {error}.") from error
    if not isinstance(after, PretrainedConfig):
        raise ConfigError(
            f"hf_overrides is a function that returned {shown(after)}. Allowed: the configuration that it got, changed."
        )
    try:
        return _changed(fields_before, _plain_fields(after))
    except TypeError as error:
        raise ConfigError(f"hf_overrides is a function whose changes are not plain values: {error}.") from error


def _plain_fields(config: Any) -> dict[str, Any]:
    # The type is an attribute of the class there.
    fields: dict[str, Any] = json.loads(json.dumps({**config.to_dict(), "model_type": config.model_type}))
    return fields


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that differ; those that are gone are None."""
    changed = {name: after.get(name) for name in {**before, **after} if before.get(name) != after.get(name)}
    for name, value in changed.items():
        old = before.get(name)
        if not isinstance(value, dict) or not isinstance(old, dict):
            continue
        if name.endswith(_NESTED):
            changed[name] = _changed(old, value)
        elif name == "rope_parameters":
            # A base that is left out is None there.
            value.update({key: old.get(key) for key, one in value.items() if one is None})
    return changed


def with_overrides(hf_config: Mapping[str, Any], given: Any) -> Mapping[str, Any]:
    """Content of `config.json` with the fields of the option: a dictionary, or one as JSON; None for none.

    Fields of nested configurations are replaced one by one, all others as they are. Rotary settings replace those of
    either form, of Transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`), but for a base that they
    leave out. Raises ConfigError for another value of the option.
    """
    overrides = _read(given)
    for name in sorted(overrides.keys() - hf_config.keys() - _OLD_ROPE - {"rope_parameters"}):
        if hint := did_you_mean(name, hf_config):
            logger.warning("hf_overrides has %s, which config.json does not have.%s", name, hint)
    changed = _replaced(hf_config, overrides)
    if overrides.keys() & _OLD_ROPE and isinstance(hf_config.get("rope_parameters"), Mapping):
        changed = {name: value for name, value in changed.items() if name not in _OLD_ROPE}
        changed["rope_parameters"] = _rope_parameters(hf_config["rope_parameters"], overrides)
    elif "rope_parameters" in overrides:
        changed.pop("rope_scaling", None)
    return changed


def overridden(given: Any) -> str:
    """Addition to the name of `config.json` in messages: which fields the option has replaced; "" for none."""
    return f" with {', '.join(_read(given))} of hf_overrides" if given else ""


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
        raise ConfigError(
            f"hf_overrides is {shown(fields)}. Allowed: a dictionary of fields of config.json, such as "
            '{"rope_theta": 1e6}, or a function of its configuration.'
        )
    return fields


def _replaced(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**fields, **changes}
    for name, value in changes.items():
        if name.endswith(_NESTED) and isinstance(value, Mapping) and isinstance(fields.get(name), Mapping):
            changed[name] = _replaced(fields[name], value)
    return changed
