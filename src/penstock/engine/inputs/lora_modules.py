"""Adapters of the command line: `name=path`, or vLLM's JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.contract.lora import LoRARequest
from penstock.errors import ConfigError


def read_lora_modules(modules: Sequence[str]) -> list[LoRARequest]:
    """Return the adapters, numbered from 1 on. Raises ConfigError for one of another form, or a name given twice."""
    adapters: list[LoRARequest] = []
    for module in modules:
        name, path = _read(module)
        if any(adapter.lora_name == name for adapter in adapters):
            raise ConfigError(f"lora_modules has {name!r} twice. Give each adapter a name of its own.")
        adapters.append(LoRARequest(name, len(adapters) + 1, path))
    return adapters


def _read(module: str) -> tuple[str, str]:
    name, _, path = module.partition("=")
    if module.lstrip().startswith("{"):
        try:
            fields = json.loads(module)
            name, path = fields["name"], fields["path"]
        except (ValueError, KeyError) as error:
            raise _invalid(module) from error
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise _invalid(module)
    return name, path


def _invalid(module: str) -> ConfigError:
    return ConfigError(
        f'lora_modules has {module!r}. Allowed: name=path, or {{"name": ..., "path": ...}} as JSON; path is a folder '
        "in PEFT's format."
    )
