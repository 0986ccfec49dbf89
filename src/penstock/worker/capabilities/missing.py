"""What no worker can do yet: its methods raise UnsupportedFeature when they are called."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import UnsupportedFeature


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


def require(method: str) -> None:
    """Raise UnsupportedFeature if `method` belongs to a missing feature."""
    for missing in MISSING:
        if method in missing.methods:
            raise UnsupportedFeature(f"{method}: {missing.feature} is not supported yet. {missing.instead}")
