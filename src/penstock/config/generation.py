"""Options of the default sampling parameters: the folder of `generation_config.json`, and values for its fields."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoints.generation_config import DO_SAMPLE, GENERATION_CONFIG_FILE, SAMPLING_FIELDS
from penstock.config.checks import did_you_mean
from penstock.errors import ConfigError

AUTO_GENERATION_CONFIG = "auto"
# Values that read no file; the second is vLLM's.
NO_GENERATION_CONFIG = ("none", "vllm")


def generation_config_folder(option: Any, model_folder: Path) -> Path:
    """Folder of the `generation_config.json` that is read: the model's, or the one that the option names.

    "none" gives the model's folder too, since the file's end tokens still count.
    Raises ConfigError for another value, or a folder without the file.
    """
    if option == AUTO_GENERATION_CONFIG or option in NO_GENERATION_CONFIG:
        return model_folder
    allowed = f"{AUTO_GENERATION_CONFIG!r}, {NO_GENERATION_CONFIG[0]!r}, or a folder with {GENERATION_CONFIG_FILE}"
    if not isinstance(option, (str, os.PathLike)):
        raise ConfigError(f"generation_config={option!r} is not valid. Allowed: {allowed}.")
    folder = Path(option).expanduser()
    if not (folder / GENERATION_CONFIG_FILE).is_file():
        raise ConfigError(
            f"generation_config={os.fspath(option)!r} is not valid: there is no {GENERATION_CONFIG_FILE} in that "
            f"folder. Allowed: {allowed}."
        )
    return folder


def check_override(override: Any) -> None:
    """Raise ConfigError unless `override` is None or has only fields that are read, whatever their values."""
    if override is None:
        return
    allowed = ", ".join((*SAMPLING_FIELDS, DO_SAMPLE))
    if not isinstance(override, Mapping):
        raise ConfigError(
            f"override_generation_config={override!r} is not valid. Allowed: a dictionary with some of {allowed}."
        )
    for name, value in override.items():
        if name in SAMPLING_FIELDS or name == DO_SAMPLE:
            continue
        meant = "max_new_tokens" if name == "max_tokens" else str(name)
        hint = did_you_mean(meant, (*SAMPLING_FIELDS, DO_SAMPLE), most=1)
        raise ConfigError(f"override_generation_config has {name!r} (given: {value!r}).{hint} Allowed: {allowed}.")
