"""Weight formats that `penstock eval` compares, as engine options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError

# As the model loads without an option: a checkpoint's own integers, a GGUF file's own blocks.
STORED = "stored"
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    STORED: {},
    "float32": {"quantization": "none", "dtype": "float32", "cpu_arithmetic": "float32"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "none": {"quantization": "none"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
FORMATS = tuple(_OPTIONS)


def parse_formats(names: str) -> list[str]:
    """Split a list such as "none,int8". Raises ConfigError for an unknown or a repeated name."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    wrong = [name for name in found if name not in _OPTIONS]
    if wrong or not found or len(set(found)) < len(found):
        raise ConfigError(
            f"--quantization {names!r} is not valid. Allowed: each of {', '.join(FORMATS)} once, with commas between."
        )
    return found


def engine_options(format: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options of a format. engine: options that the caller gave, which a format's own replace."""
    return {**engine, **_OPTIONS[format]}
