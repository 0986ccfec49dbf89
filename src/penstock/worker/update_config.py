"""Options that may change while an engine runs, for the next reload of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoints.resolve import resolve_model_folder
from penstock.config import EngineConfig
from penstock.errors import ConfigError

# Options by section, as in vLLM.
CHANGEABLE = {
    "load_config": ("load_format", "model_loader_extra_config", "use_tqdm_on_load"),
    "model_config": ("model",),
}


def updated_config(config: EngineConfig, overrides: Any) -> EngineConfig:
    """Return the configuration with overrides by section and field.

    Raises ConfigError for a section, field or value that is not allowed; ModelNotFound for a missing model.
    """
    changes = {section: _fields(section, fields) for section, fields in _sections(overrides)}
    load = replace(config.load, **changes.get("load_config", {}))
    model = config.model
    for name in changes.get("model_config", {}).values():
        if not isinstance(name, str):
            raise ConfigError(f"model_config.model={name!r} is not valid. Allowed: a folder, or a hub id.")
        model = replace(model, model=name, folder=resolve_model_folder(name, mmproj=model.mmproj))
    return replace(config, load=load, model=model)


def _sections(overrides: Any) -> list[tuple[str, Any]]:
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"update_config takes a dictionary of sections, not {overrides!r}. "
            "Example: {'load_config': {'load_format': 'auto'}}."
        )
    for section in overrides:
        if section not in CHANGEABLE:
            raise ConfigError(f"update_config cannot change {section!r}. Allowed: {', '.join(CHANGEABLE)}.")
    return list(overrides.items())


def _fields(section: str, fields: Any) -> dict[str, Any]:
    allowed = CHANGEABLE[section]
    if not isinstance(fields, Mapping):
        raise ConfigError(f"update_config: {section}={fields!r} is not valid. Allowed: a dictionary of options.")
    for name, value in fields.items():
        if name not in allowed:
            raise ConfigError(
                f"update_config cannot change {section}.{name} (given: {value!r}) while the engine runs. "
                f"Allowed: {', '.join(allowed)}."
            )
    return dict(fields)
