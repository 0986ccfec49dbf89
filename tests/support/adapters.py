"""LoRA adapters made by PEFT, with random weights, and PEFT's own results of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from penstock.contract import Parts
from penstock.features.lora.request import LoRARequest

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Different ranks, modules and options of PEFT.
VARIANTS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    {"r": 8, "lora_alpha": 4, "target_modules": ALL_LINEAR, "use_rslora": True},
    {"r": 3, "lora_alpha": 6, "target_modules": ["gate_proj", "down_proj"]},
    {"r": 16, "lora_alpha": 16, "target_modules": [*ALL_LINEAR, "lm_head"]},
    {"r": 5, "lora_alpha": 10, "target_modules": ["embed_tokens", "o_proj"]},
    {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["k_proj", "up_proj"],
        "rank_pattern": {"k_proj": 7},
        "alpha_pattern": {r"layers\.1\.mlp\.up_proj": 9},
    },
    {"r": 6, "lora_alpha": 6, "target_modules": ["lm_head", "embed_tokens", "up_proj"]},
    {"r": 1, "lora_alpha": 1, "target_modules": "all-linear"},
]


def make_adapter(model: PreTrainedModel, folder: Path, *, seed: int, **options: Any) -> None:
    """Save an adapter with random weights that change the model's outputs noticeably; the model stays as it is."""
    made = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **options}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 / parameter.shape[0] ** 0.25)
    made.save_pretrained(folder)
    made.unload()


def make_adapters(model: PreTrainedModel, folder: Path, variants: Sequence[dict[str, Any]] = VARIANTS) -> list[Path]:
    """Save an adapter of each variant, in a folder of its own."""
    folders = [folder / f"adapter{index}" for index in range(len(variants))]
    for index, (variant, where) in enumerate(zip(variants, folders, strict=True)):
        make_adapter(model, where, seed=index, **variant)
    return folders


def with_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The model with an adapter; `unload` it afterwards."""
    return PeftModel.from_pretrained(model, folder).eval()


def request_of(number: int, folder: Path, **fields: Any) -> LoRARequest:
    """An adapter by its number, from 1 on."""
    return LoRARequest(f"adapter{number}", number, str(folder), **fields)


def parts_of(request: LoRARequest | None) -> Parts | None:
    """Parts of a request with this adapter."""
    return None if request is None else Parts.of([request.part])
