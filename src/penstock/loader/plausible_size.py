"""Checks of a model's size before it is allocated."""

from __future__ import annotations

from torch import device as torch_device
from torch import nn

from penstock.checkpoints.size_limits import describe_sizes
from penstock.checkpoints.weight_paths import weight_paths
from penstock.config import ModelConfig
from penstock.device.limits import memory_limit
from penstock.errors import CheckpointError, OutOfMemory
from penstock.observability.units import format_bytes

# Parameters per byte: more than any format packs, and more than a draft head shares with its target.
_PARAMETERS_PER_BYTE = 16
# Smallest format: 4 bits per parameter.
_PARAMETERS_PER_BYTE_OF_MEMORY = 2


def check_against_files(model: nn.Module, model_config: ModelConfig) -> None:
    """Raise CheckpointError for a model with far more parameters than its weight files have bytes."""
    num_parameters = _num_parameters(model)
    num_bytes = sum(path.stat().st_size for path in weight_paths(model_config.folder))
    if num_parameters > _PARAMETERS_PER_BYTE * num_bytes:
        raise CheckpointError(
            f"{model_config.folder / 'config.json'} describes a model of {num_parameters:,} parameters "
            f"({describe_sizes(model_config.hf_config)}), but the weight files beside it have "
            f"{format_bytes(num_bytes)}. One of its sizes is wrong, or the files are those of another model."
        )


def check_against_memory(model: nn.Module, model_config: ModelConfig, device: torch_device) -> None:
    """Raise OutOfMemory for a model that does not fit on this machine in any format."""
    if device.type != "cpu":  # devices without memory overcommit
        return
    num_parameters, total_bytes = _num_parameters(model), memory_limit().total_bytes
    if num_parameters > _PARAMETERS_PER_BYTE_OF_MEMORY * total_bytes:
        raise OutOfMemory(
            f"{model_config.folder / 'config.json'} describes a model of {num_parameters:,} parameters "
            f"({describe_sizes(model_config.hf_config)}), and this machine has {format_bytes(total_bytes)} of memory."
        )


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
