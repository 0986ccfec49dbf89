"""What a worker cannot do yet, or not on this device: one table, printed, compared and tested.

A method of the table raises UnsupportedFeature when it is called; an option of the table when the engine starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.config import EngineConfig
from penstock.config.speculative import MODEL_METHODS
from penstock.errors import UnsupportedArgument, UnsupportedFeature


@dataclass(frozen=True, slots=True)
class Missing:
    """feature: its name for people. methods: the worker's methods that belong to it."""

    feature: str
    methods: tuple[str, ...]
    instead: str


MISSING = (
    Missing("sleep mode", ("sleep", "wake_up"), "Close the engine and create it again."),
    Missing(
        "LoRA adapters", ("add_lora", "remove_lora", "pin_lora", "list_loras"), "Merge the adapter into a checkpoint."
    ),
    Missing(
        "weight transfer",
        ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"),
        "Save a checkpoint, and call reload_weights with its folder.",
    ),
    Missing("saving tensorised models", ("save_tensorized_model",), "Use save_sharded_state."),
    Missing("multimodal inputs", ("reset_mm_cache", "reset_encoder_cache"), "Use a text model."),
)


@dataclass(frozen=True, slots=True)
class NotWithRanks:
    """What several workers that share every layer cannot do yet."""

    feature: str
    is_asked_for: Callable[[EngineConfig], bool]
    instead: str


def _is_on_cuda(config: EngineConfig) -> bool:
    import torch

    return config.device.device == "cuda" or (config.device.device == "auto" and torch.cuda.is_available())


NOT_WITH_RANKS = (NotWithRanks("device='cuda'", _is_on_cuda, "Use device='cpu', or tensor_parallel_size=1."),)

# What they cannot do where each has layers of its own.
NOT_WITH_STAGES = (
    NotWithRanks(
        "models that draft",
        lambda config: config.speculative.method in MODEL_METHODS,
        "Use speculative_config={'method': 'ngram', ...}, or pipeline_parallel_size=1.",
    ),
)


def require(method: str) -> None:
    """Raise UnsupportedFeature if `method` belongs to a missing feature."""
    for missing in MISSING:
        if method in missing.methods:
            raise UnsupportedFeature(f"{method}: {missing.feature} is not supported yet. {missing.instead}")


def check_options(config: EngineConfig) -> None:
    """Refuse, at start and by name, what this combination of options cannot do."""
    parallel, several = config.parallel, "more than one worker is"
    for name, size, who, table in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, several, (*NOT_WITH_RANKS, *NOT_WITH_STAGES)),
        ("tensor_parallel_size", parallel.tensor_parallel_size, several, NOT_WITH_RANKS),
    ):
        for cannot in table if size != 1 else ():
            if cannot.is_asked_for(config):
                raise UnsupportedArgument(
                    f"{name}={size}: {who} not supported with {cannot.feature} yet. {cannot.instead}"
                )
