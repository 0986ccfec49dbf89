"""`--config FILE.yaml`: flags of a command from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.cli.failures import file_named, readable_errors
from penstock.cli.flags import with_dashes
from penstock.errors import ConfigError

_FLAG = "--config"


class ConfigFile(NamedTuple):
    """Flags of a configuration file, and the arguments beside them. path: None without a file."""

    path: Path | None
    flags: list[str]
    others: list[str]


def read_config_file(args: Sequence[str]) -> ConfigFile:
    """Read the flags of the file that `--config` names; those of the command line are to follow and override them.

    An entry `max-model-len: 4096` is the flag `--max-model-len 4096`; true and false are `--flag` and `--no-flag`; a
    list repeats the flag; a dictionary is JSON; `model` is the positional argument. Errors end the command.
    """
    others, path = _without_config(args)
    if path is None:
        return ConfigFile(None, [], others)
    with readable_errors():
        entries = _read(path)
        model = entries.pop("model", None)
        flags = [flag for name, value in entries.items() for flag in _flags(name, value)]
    # The command line's model comes first, and a second one would be an error.
    has_model = any(arg in ("--model", "-m") or arg.startswith("--model=") for arg in others) or (
        bool(others) and not others[0].startswith("-")
    )
    return ConfigFile(path, flags if model is None or has_model else [*flags, "--model", str(model)], others)


def _without_config(args: Sequence[str]) -> tuple[list[str], Path | None]:
    rest: list[str] = []
    path = None
    remaining = iter(args)
    for arg in remaining:
        flag, equals, value = arg.partition("=")
        if arg == "--":
            rest += [arg, *remaining]
        elif flag == _FLAG:
            path = Path(value if equals else next(remaining, ""))
        else:
            rest.append(arg)
    return rest, path


def _read(path: Path) -> dict[str, Any]:
    import yaml

    with file_named(_FLAG, path):
        text = path.read_text(encoding="utf-8")
    try:
        entries = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{_FLAG} {path} is not valid YAML: {error}") from error
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        raise ConfigError(f"{_FLAG} {path} is not valid. Allowed: a mapping of flags to values, such as `port: 8000`.")
    return entries


def _flags(name: str, value: Any) -> Iterator[str]:
    flag = f"--{with_dashes(name).removeprefix('--')}"
    if value is None:
        return
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
    elif isinstance(value, list):
        for item in value:
            yield from (flag, _text(item))
    else:
        yield from (flag, _text(value))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
