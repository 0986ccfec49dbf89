"""Weight formats that `penstock eval` compares, as engine options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoints.quantized_checkpoint import quantization_of_checkpoint
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.loader.gguf.tensors import find_gguf

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


def default_formats(config: EngineConfig) -> list[str]:
    """Formats that are compared unless others are asked for: what a quantised checkpoint runs with, then int8, int4."""
    is_quantized = quantization_of_checkpoint(config.model.hf_config) is not None
    has_own = is_quantized or find_gguf(config.model.folder, config.load) is not None
    return [*([STORED] if has_own else []), "none", "int8", "int4"]


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
