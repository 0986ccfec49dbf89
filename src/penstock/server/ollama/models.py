"""Descriptions of the served model in Ollama's API."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.checkpoints.quantized_checkpoint import quantization_of_checkpoint
from penstock.checkpoints.weight_paths import weight_paths
from penstock.config import ModelConfig
from penstock.server.served_model import ServedModel

# Time at which a model is unloaded that stays.
_NEVER = "9999-12-31T23:59:59Z"


def as_time(seconds: float) -> str:
    """Time in seconds since 1970, as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def family(config: ModelConfig) -> str:
    return str(config.hf_config.get("model_type", ""))


def details(config: ModelConfig) -> dict[str, Any]:
    """Format, family and quantisation of a model."""
    is_gguf = any(path.suffix == ".gguf" for path in weight_paths(config.folder))
    quantization = config.quantization or quantization_of_checkpoint(config.hf_config)
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family(config),
        "families": [family(config)],
        "quantization_level": quantization or config.checkpoint_dtype,
    }


def modified_at(config: ModelConfig) -> str:
    """Time of the newest weight file."""
    return as_time(max((path.stat().st_mtime for path in weight_paths(config.folder)), default=0.0))


def model_cards(model: ServedModel, names: list[str]) -> list[dict[str, Any]]:
    """Entries of a list of models, by their names: those of the model itself, and others, which share its weights.

    The digest is that of names, sizes and times of the weight files, which may have many GiB; of others, of their name
    too.
    """
    config = model.engine.model_config
    found = [(path.name, path.stat()) for path in weight_paths(config.folder)]
    files = [(name, status.st_size, status.st_mtime_ns) for name, status in found]
    about = {
        "modified_at": modified_at(config),
        "size": sum(size for _, size, _ in files),
        "details": details(config),
    }
    cards = []
    for name in names:
        identity = [files, config.model, None if name in model.names else name]
        digest = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()
        cards.append({"name": name, "model": name, "digest": digest, **about})
    return cards


def running_cards(model: ServedModel, names: list[str]) -> list[dict[str, Any]]:
    """Entries of a list of loaded models."""
    return [{**card, "expires_at": _NEVER, "context_length": model.max_model_len} for card in model_cards(model, names)]
