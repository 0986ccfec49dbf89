"""Sampling parameters of commands: what flags say, else the model, else the command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_defaults(flags: Mapping[str, Any], model: str, engine: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The sampling parameters of a command's requests.

    flags: by parameter; None is one that was not given. engine: options as `EngineConfig.create` takes them.
    defaults: the command's own. Of a hub id only the configuration is fetched.

    Raises InvalidParameter for a bad flag before the model is looked for, and what reading its configuration raises.
    """
    from penstock.config import ModelConfig
    from penstock.config.resolve import resolve_metadata_folder
    from penstock.contract import SamplingParams
    from penstock.engine.default_sampling import read_default_sampling

    given = {name: value for name, value in flags.items() if value is not None}
    SamplingParams(**{**defaults, **given})
    folder, _ = resolve_metadata_folder(model, engine.get("revision"))
    options = {name: engine[name] for name in ("generation_config", "override_generation_config") if name in engine}
    return {**defaults, **read_default_sampling(ModelConfig.load(folder, **options)).fields, **given}
