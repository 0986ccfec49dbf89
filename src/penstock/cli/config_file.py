"""`--config FILE.yaml`: flags of a command from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.checkpoints.json_file import MAX_DEPTH, shown
from penstock.cli.failures import read_file
from penstock.cli.sections import with_dashes
from penstock.errors import ConfigError

_FLAG = "--config"
# Values of a file, those in lists and mappings included: no file has so many, but one that repeats its own parts.
_MOST_VALUES = 100_000
_MOST_BYTES = 1 << 20
_Plain = str | int | float | bool | None


def read_config_file(path: Path) -> dict[str, Any]:
    """Entries of a file: flags by name, without those that are null.

    An entry `max-model-len: 4096` is the flag `--max-model-len 4096`; true and false are `--flag` and `--no-flag`; a
    list is several values; a dictionary is JSON; `model` is the model. Raises ConfigError.
    """
    entries = _read(path)
    model = entries.get("model")
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"{_FLAG} {path} has model: {shown(model)}. Allowed: a text, in quotes if it is a number.")
    return {name: value for name, value in entries.items() if value is not None}


def _read(path: Path) -> dict[str, Any]:
    import yaml

    class Loader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]
        """Loader of plain values: a date stays the text that it is."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    data = read_file(_FLAG, path)
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{_FLAG} {path} has {len(data):,} bytes. Allowed: {_MOST_BYTES:,}.")
    try:
        entries = yaml.load(data.decode("utf-8-sig"), Loader) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{_FLAG} {path} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{_FLAG} {path} is nested too deep. Allowed: {MAX_DEPTH} levels.") from error
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        raise ConfigError(f"{_FLAG} {path} is not valid. Allowed: a mapping of flags to values, such as `port: 8000`.")
    for name, value in entries.items():
        _check(path, name, value)
    return entries


def _check(path: Path, name: str, entry: Any) -> None:
    """Raise ConfigError, naming the file and the entry, for an entry that no flag can be made of."""
    flag = name.removeprefix("--")
    if not flag or flag.startswith("-") or with_dashes(flag) == "config":
        raise ConfigError(f"{_FLAG} {path} has {shown(name)}, which is no option of a file. Leave it out.")
    waiting: list[tuple[Any, int]] = [(entry, 1)]
    num_values = 0
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        where = f"{_FLAG} {path} has {name}"
        if depth > MAX_DEPTH or num_values > _MOST_VALUES:
            raise ConfigError(
                f"{where}, which is too large. Allowed: {MAX_DEPTH} levels and {_MOST_VALUES:,} values, repeated ones "
                "(YAML's aliases) included."
            )
        if isinstance(value, dict):
            if not all(isinstance(key, _Plain) for key in value):
                raise ConfigError(f"{where}: {shown(value)}. Allowed: keys that are texts or numbers.")
            waiting.extend((one, depth + 1) for one in value.values())
        elif isinstance(value, list):
            waiting.extend((one, depth + 1) for one in value)
        elif not isinstance(value, _Plain):
            raise ConfigError(
                f"{where}: {shown(value)}, a {type(value).__name__}. Allowed: texts, numbers, true, false, null, and "
                "lists and mappings of these; quotes make a text of anything."
            )
