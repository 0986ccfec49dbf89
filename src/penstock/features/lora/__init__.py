"""LoRA adapters: PEFT checkpoints, tables of a model's layers, and which adapter each request has."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.contract.feature import Feature
from penstock.contract.memory_tags import WEIGHTS
from penstock.features.lora.recording import RecordedAdapter
from penstock.features.lora.request import AdapterPart


def _is_enabled(config: EngineConfig) -> bool:
    return config.lora.enable_lora


FEATURE = Feature(
    name="LoRA adapters",
    is_on=_is_enabled,
    how_to_turn_on="Start the engine with enable_lora=True.",
    parts=(AdapterPart,),
    keeps_layer_inputs=True,
    recorded_call=RecordedAdapter,
    deployment_side="penstock.features.lora.adapter_list:AdapterList",
    scheduler_side="penstock.features.lora.scheduling:LoRAScheduling",
    worker_side="penstock.features.lora.worker:LoRAWorker",
    deployment_methods=(
        "add_lora",
        "prefetch_lora",
        "offer_loras",
        "remove_lora",
        "pin_lora",
        "known_loras",
        "take_lora_number",
    ),
    worker_methods=(
        "add_lora",
        "prefetch_lora",
        "lora_status",
        "lora_digests",
        "loading_loras",
        "remove_lora",
        "pin_lora",
        "list_loras",
    ),
    memory_of_methods={"add_lora": (WEIGHTS,)},
    memory={"LoRA adapters": "penstock.features.lora.tables:adapter_bytes"},
)
