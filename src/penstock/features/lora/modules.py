"""Adapters of the command line: `name=path`, or vLLM's JSON."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.checkpoints.json_file import parse_json_text, shown
from penstock.errors import ConfigError
from penstock.features.lora.request import LoRARequest

_FIELDS = {"name", "path", "base_model_name"}


def read_lora_modules(modules: Sequence[str]) -> list[LoRARequest]:
    """Return the adapters, numbered from 1 on. Raises ConfigError for one of another form, or a name given twice."""
    adapters: list[LoRARequest] = []
    for module in modules:
        fields = _read(module)
        if any(adapter.lora_name == fields["name"] for adapter in adapters):
            raise ConfigError(f"lora_modules has {fields['name']!r} twice. Give each adapter a name of its own.")
        base = fields.get("base_model_name") or ""
        adapters.append(LoRARequest(fields["name"], len(adapters) + 1, fields["path"], base_model_name=base))
    return adapters


def _read(module: str) -> dict[str, str]:
    name, _, path = module.partition("=")
    fields: object = {"name": name, "path": path}
    if module.lstrip().startswith("{"):
        try:
            fields = parse_json_text(module)
        except ValueError as error:
            raise _invalid(module) from error
    if not isinstance(fields, dict) or not fields.keys() <= _FIELDS:
        raise _invalid(module)
    given = {field: value for field, value in fields.items() if value is not None}
    if not {"name", "path"} <= given.keys() or not all(isinstance(one, str) and one for one in given.values()):
        raise _invalid(module)
    return given


def _invalid(module: str) -> ConfigError:
    return ConfigError(
        f'lora_modules has {shown(module)}. Allowed: name=path, or {{"name": ..., "path": ...}} as JSON, which may '
        "have base_model_name too; path is a folder in PEFT's format."
    )
